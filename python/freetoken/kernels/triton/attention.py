"""Causal attention over the paged cache, with a softmax that is computed as the keys come by.

Query heads that share a key head are the rows of one tile. Two kernels: `decode`, one token a
program and its positions divided among SPLITS programs, whose results a third kernel combines; and
`prefill`, a tile of consecutive tokens. Neither's grid depends on a value in device memory.
A token's result does not depend on the others' in either kernel.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from freetoken.gpu_budget import ATTENTION_SHARES
from freetoken.kernels.triton.attention_kernels import combine_kernel, decode_kernel, prefill_kernel
from freetoken.kernels.triton.compile_cases import CompileCase
from freetoken.kernels.triton.products import FUSED

_LOG2_E = 1.4426950408889634
_EVERYTHING = 2**31 - 1  # a window that no position is beyond
_TILE_BYTES = 1 << 14  # of keys, and of values: two stages of both fit any GPU's 64 KiB
_QUERY_BYTES = 1 << 15  # of a prefill's tile, which may lie beside them
_PREFILL_ROWS = 64
_OPTIONS = {"num_warps": 4, "num_stages": 2, **FUSED}
_COMBINE_OPTIONS = {"num_warps": 4, **FUSED}
_DECODE_PROGRAMS = 128  # for one token: about one per multiprocessor of a large GPU


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As freetoken.kernels.base.Ops says; caches float32 or bfloat16, whose type the products of
    queries and keys, and of shares and values, are computed in (and added in float32)."""
    # one token per sequence or fewer: a decode step, or something as small
    run = _decode if q.shape[0] <= block_table.shape[0] else _prefill
    return run(
        q,
        k_cache,
        v_cache,
        block_table,
        sequence,
        positions,
        sinks,
        scale * _LOG2_E,
        _EVERYTHING if window is None else window,
    )


def _tile(k_cache: Tensor) -> tuple[int, int]:
    """BLOCK_N and BLOCK_D."""
    block_d = max(16, triton.next_power_of_2(k_cache.shape[3]))
    return min(64, max(16, _TILE_BYTES // (block_d * k_cache.element_size()))), block_d


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
) -> Tensor:
    tokens, heads, dim = q.shape
    _, page_tokens, kv_heads, _ = k_cache.shape
    pages = block_table.shape[1]
    block_n, block_d = _tile(k_cache)
    # a number of the model alone: what a share is must not depend on the batch
    splits = min(ATTENTION_SHARES, triton.next_power_of_2(triton.cdiv(_DECODE_PROGRAMS, kv_heads)))
    written = min(splits, triton.cdiv(pages * page_tokens, block_n))
    out = torch.empty_like(q)
    partials = torch.empty(tokens, heads, splits, dim, device=q.device)
    logs = torch.empty(tokens, heads, splits, device=q.device)
    decode_kernel[(tokens, kv_heads, written)](
        q,
        k_cache,
        v_cache,
        block_table,
        sequence,
        positions,
        partials,
        logs,
        kv_heads,
        pages,
        window,
        scale,
        GROUP=heads // kv_heads,
        DIM=dim,
        PAGE_TOKENS=page_tokens,
        SPLITS=splits,
        BLOCK_M=max(16, triton.next_power_of_2(heads // kv_heads)),
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        **_OPTIONS,
    )
    combine_kernel[(tokens, heads)](
        partials,
        logs,
        logs if sinks is None else sinks,
        sequence,
        out,
        heads,
        written,
        _LOG2_E,
        HAS_SINKS=sinks is not None,
        DIM=dim,
        SPLITS=splits,
        BLOCK_D=block_d,
        **_COMBINE_OPTIONS,
    )
    return out


def _prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
) -> Tensor:
    tokens, heads, dim = q.shape
    _, page_tokens, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    block_n, block_d = _tile(k_cache)
    rows = min(_PREFILL_ROWS, _QUERY_BYTES // (block_d * k_cache.element_size()))
    block_m = max(rows, triton.next_power_of_2(group))
    out = torch.empty_like(q)
    for careful in (False, True):
        prefill_kernel[(triton.cdiv(tokens, block_m // group), kv_heads)](
            q,
            k_cache,
            v_cache,
            block_table,
            sequence,
            positions,
            out if sinks is None else sinks,
            out,
            tokens,
            kv_heads,
            block_table.shape[1],
            window,
            scale,
            _LOG2_E,
            HAS_SINKS=sinks is not None,
            GROUP=group,
            DIM=dim,
            PAGE_TOKENS=page_tokens,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_D=block_d,
            CAREFUL=careful,
            **_OPTIONS,
        )
    return out


def _signature(cache: str, pointers: str, numbers: str) -> dict[str, str]:
    types = {name: "*fp32" for name in pointers.split()}
    types |= {name: "i32" for name in numbers.split()}
    types |= {"k_ptr": f"*{cache}", "v_ptr": f"*{cache}", "table_ptr": "*i32"}
    return types | {"sequence_ptr": "*i32", "positions_ptr": "*i32", "scale": "fp32"}


def _sizes(dim: int, **others: int) -> dict[str, object]:
    return {"GROUP": 8, "DIM": dim, "PAGE_TOKENS": 16, "BLOCK_D": dim, **others}


COMPILE_CASES = [
    *(
        CompileCase(
            f"attention_decode_{cache}",
            decode_kernel,
            _signature(cache, "q_ptr partials_ptr logs_ptr", "kv_heads pages window"),
            _sizes(dim, SPLITS=32, BLOCK_M=16, BLOCK_N=block_n),
            _OPTIONS,
        )
        for cache, dim, block_n in (("bf16", 128, 64), ("fp32", 256, 16))
    ),
    CompileCase(
        "attention_combine",
        combine_kernel,
        {name: "*fp32" for name in ("partials_ptr", "logs_ptr", "sinks_ptr", "out_ptr")}
        | {"sequence_ptr": "*i32", "heads": "i32", "written": "i32", "log2_e": "fp32"},
        {"HAS_SINKS": True, "DIM": 128, "SPLITS": 32, "BLOCK_D": 128},
        _COMBINE_OPTIONS,
    ),
    *(
        CompileCase(
            f"attention_prefill_{cache}{'_careful' if careful else ''}",
            prefill_kernel,
            _signature(cache, "q_ptr sinks_ptr out_ptr", "tokens kv_heads pages window")
            | {"log2_e": "fp32"},
            _sizes(dim, HAS_SINKS=sinks, BLOCK_M=block_m, BLOCK_N=block_n, CAREFUL=careful),
            _OPTIONS,
        )
        for cache, dim, block_m, block_n, sinks in (
            ("bf16", 128, 64, 64, True),
            ("fp32", 256, 32, 16, False),
        )
        for careful in (False, True)
    ),
]
