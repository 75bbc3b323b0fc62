"""Rows of an embedding, and what stands between gate and up of a dense feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.activations import Activation
from freetoken.kernels.triton.activations import CLAMPED_SWIGLU, KINDS, gated, kernel_activation
from freetoken.kernels.triton.compile_cases import CompileCase
from freetoken.kernels.triton.formats import TRITON_FORMATS
from freetoken.kernels.triton.matrix import TritonMatrix

_BLOCK = 1024
_COLUMNS = 512


@triton.jit
def gated_activation_kernel(
    gate_ptr, up_ptr, out_ptr, numbers, alpha, limit, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0)
    up = tl.load(up_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, gated(gate, up, alpha, limit, KIND), mask=inside)


@triton.jit
def embed_kernel(
    ids_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    factor,
    cols,
    code_row_stride,
    scale_row_stride,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_K columns of one token's row."""
    token = tl.program_id(0).to(tl.int64)
    k0 = tl.program_id(1) * BLOCK_K
    row = tl.load(ids_ptr + token) + tl.zeros([1], tl.int64)
    numbers = TILE(
        codes_ptr, scales_ptr, row, row >= 0, k0, cols, code_row_stride, scale_row_stride, BLOCK_K
    )
    k = (k0 + tl.arange(0, BLOCK_K))[None, :]
    tl.store(out_ptr + token * cols + k, numbers * factor, mask=k < cols)


def gated_activation(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up, float32 [T, I]. Raises CheckpointError for an activation without kernel."""
    kind, alpha, limit = kernel_activation(activation)
    out = torch.empty_like(gate)
    numbers = gate.numel()
    gated_activation_kernel[(triton.cdiv(numbers, _BLOCK),)](
        gate, up, out, numbers, alpha, limit, KIND=kind, BLOCK=_BLOCK, num_warps=4
    )
    return out


def embed(ids: Tensor, w: TritonMatrix) -> Tensor:
    """Dequantised rows: ids int64 [T] -> float32 [T, cols]."""
    tokens = ids.shape[0]
    out = torch.empty(tokens, w.cols, device=ids.device)
    fmt = w.format
    block_k = min(_COLUMNS, triton.next_power_of_2(w.cols), fmt.most_block_k)
    block_k = max(block_k, fmt.least_block_k)
    embed_kernel[(tokens, triton.cdiv(w.cols, block_k))](
        ids,
        w.codes,
        w.scales,
        out,
        w.factor,
        w.cols,
        w.code_row_stride,
        w.scale_row_stride,
        TILE=fmt.tile,
        BLOCK_K=block_k,
        num_warps=1,
    )
    return out


_GATED = {"gate_ptr": "*fp32", "up_ptr": "*fp32", "out_ptr": "*fp32", "numbers": "i32"}
_GATED |= {"alpha": "fp32", "limit": "fp32"}
_EMBED = {"ids_ptr": "*i64", "codes_ptr": "*u8", "scales_ptr": "*u8", "out_ptr": "*fp32"}
_EMBED |= {"factor": "fp32", "cols": "i32", "code_row_stride": "i32", "scale_row_stride": "i32"}
COMPILE_CASES = [
    *(
        CompileCase(
            f"gated_activation_{kind}",
            gated_activation_kernel,
            _GATED,
            {"KIND": kind, "BLOCK": _BLOCK},
            {"num_warps": 4},
        )
        for kind in (*KINDS.values(), CLAMPED_SWIGLU)
    ),
    CompileCase(
        "embed_Q6_K",
        embed_kernel,
        _EMBED,
        {"TILE": TRITON_FORMATS["Q6_K"].tile, "BLOCK_K": _COLUMNS},
        {"num_warps": 1},
    ),
]
