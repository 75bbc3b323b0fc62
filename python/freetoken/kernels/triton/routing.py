"""The router's choice: softmax over the experts, then the largest few."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.compile_cases import CompileCase


@triton.jit
def route_topk_kernel(
    logits_ptr,
    weights_ptr,
    ids_ptr,
    experts,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One token. A NaN, an infinite or an empty row makes every weight NaN, as on the CPU."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < experts
    logits = tl.load(logits_ptr + token * experts + expert, mask=inside, other=float("-inf"))
    shares = tl.where(inside, tl.exp(logits - tl.max(logits, axis=0)), 0.0)
    total = tl.sum(shares, axis=0)
    keys = _sort_keys(logits, expert)
    keys = tl.where(inside, keys, -(1 << 63))  # below any expert's key
    place = tl.arange(0, BLOCK_K)
    weights = tl.zeros([BLOCK_K], tl.float32)
    ids = tl.zeros([BLOCK_K], tl.int32)
    for k in range(TOP_K):
        best = tl.max(keys, axis=0)
        chosen = keys == best
        weight = tl.sum(tl.where(chosen, shares, 0.0), axis=0)
        weights = tl.where(place == k, weight, weights)
        ids = tl.where(place == k, tl.sum(tl.where(chosen, expert, 0), axis=0), ids)
        keys = tl.where(chosen, -(1 << 63), keys)
    if RENORMALIZE:  # but keep a total that is not a number
        total = tl.where(total != total, total, tl.sum(weights, axis=0))
    out = token * TOP_K + place
    tl.store(weights_ptr + out, weights / total, mask=place < TOP_K)
    tl.store(ids_ptr + out, ids, mask=place < TOP_K)


@triton.jit
def _sort_keys(logits, expert):
    """int64 that order as the logits do, and of equal ones the lower id first. All distinct, a NaN
    included, so that whatever the logits are, the chosen ids are valid and distinct."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)  # -0 equals 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - expert)


def route_topk(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """float32 [T, E] -> weights float32 [T, K], ids int32 [T, K]."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    # one warp: each of the top_k rounds is then a few shuffles, without a barrier
    route_topk_kernel[(tokens,)](
        logits,
        weights,
        ids,
        experts,
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        num_warps=1,
    )
    return weights, ids


_SIGNATURE = {"logits_ptr": "*fp32", "weights_ptr": "*fp32", "ids_ptr": "*i32", "experts": "i32"}
COMPILE_CASES = [
    CompileCase(
        f"route_top{top_k}_of_{experts}",
        route_topk_kernel,
        _SIGNATURE,
        {"TOP_K": top_k, "RENORMALIZE": True, "BLOCK_E": experts, "BLOCK_K": block},
        {"num_warps": 1},
    )
    for top_k, block, experts in ((4, 4, 32), (10, 16, 512))
]
