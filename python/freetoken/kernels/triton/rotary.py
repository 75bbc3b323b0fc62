"""Rotary embeddings in place, and storing keys and values in the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.compile_cases import CompileCase

_HEADS = 4  # that a program rotates: their cosines and sines are read once
_ROW_BLOCK = 1024


@triton.jit
def rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_heads,
    k_heads,
    dim,
    half,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """HEADS heads of one token: of the queries in the first programs, then of the keys."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups = tl.cdiv(q_heads, HEADS)
    x_ptr, heads, first = q_ptr, q_heads, group * HEADS
    if group >= q_groups:
        x_ptr, heads, first = k_ptr, k_heads, (group - q_groups) * HEADS
    pair = tl.arange(0, BLOCK)[None, :]
    head = first + tl.arange(0, HEADS)[:, None]
    inside = (head < heads) & (pair < half)
    cos = tl.load(cos_ptr + token * half + pair, mask=pair < half, other=0.0)
    sin = tl.load(sin_ptr + token * half + pair, mask=pair < half, other=0.0)
    at = x_ptr + (token * heads + head) * dim
    if INTERLEAVED:
        a_at = at + 2 * pair
        b_at = a_at + 1
    else:
        a_at = at + pair
        b_at = a_at + half
    a = tl.load(a_at, mask=inside, other=0.0)
    b = tl.load(b_at, mask=inside, other=0.0)
    tl.store(a_at, a * cos - b * sin, mask=inside)
    tl.store(b_at, b * cos + a * sin, mask=inside)


@triton.jit
def write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, row_elements, BLOCK: tl.constexpr
):
    """A piece of one token's keys and values, rounded to the cache's type."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < row_elements
    to = tl.load(slots_ptr + token) * row_elements + at
    cached = k_cache_ptr.dtype.element_ty
    k = tl.load(k_ptr + token * row_elements + at, mask=inside)
    v = tl.load(v_ptr + token * row_elements + at, mask=inside)
    tl.store(k_cache_ptr + to, k.to(cached), mask=inside)
    tl.store(v_cache_ptr + to, v.to(cached), mask=inside)


def rotary_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    """Rotate float32 q [T, Hq, D] and k [T, Hk, D] in place by cos, sin [T, R/2]."""
    tokens, q_heads, dim = q.shape
    k_heads, half = k.shape[1], cos.shape[1]
    grid = (tokens, triton.cdiv(q_heads, _HEADS) + triton.cdiv(k_heads, _HEADS))
    rotary_kernel[grid](
        q,
        k,
        cos,
        sin,
        q_heads,
        k_heads,
        dim,
        half,
        INTERLEAVED=interleaved,
        HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(half),
        num_warps=1,
    )


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store k, v [T, Hk, D] at rows `slots` of caches of any float type."""
    tokens, heads, dim = k.shape
    grid = (tokens, triton.cdiv(heads * dim, _ROW_BLOCK))
    write_kv_kernel[grid](k, v, k_cache, v_cache, slots, heads * dim, BLOCK=_ROW_BLOCK)


_ROTARY = {name: "*fp32" for name in ("q_ptr", "k_ptr", "cos_ptr", "sin_ptr")}
_ROTARY |= {name: "i32" for name in ("q_heads", "k_heads", "dim", "half")}
_WRITE = {
    "k_ptr": "*fp32",
    "v_ptr": "*fp32",
    "k_cache_ptr": "*bf16",
    "v_cache_ptr": "*bf16",
    "slots_ptr": "*i64",
    "row_elements": "i32",
}
COMPILE_CASES = [
    *(
        CompileCase(
            f"rotary_{'pairs' if interleaved else 'halves'}",
            rotary_kernel,
            _ROTARY,
            {"INTERLEAVED": interleaved, "HEADS": _HEADS, "BLOCK": 64},
            {"num_warps": 1},
        )
        for interleaved in (False, True)
    ),
    CompileCase("write_kv", write_kv_kernel, _WRITE, {"BLOCK": _ROW_BLOCK}, {"num_warps": 4}),
]
