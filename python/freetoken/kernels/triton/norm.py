"""RMS norms over the last dimension."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.compile_cases import CompileCase


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, cols, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """One row. With ADD the row is residual + x, and written back to residual."""
    row = tl.program_id(0).to(tl.int64) * cols
    at = tl.arange(0, BLOCK)
    inside = at < cols
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0)
    if ADD:
        x += tl.load(residual_ptr + row + at, mask=inside, other=0.0)
        tl.store(residual_ptr + row + at, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / cols + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + row + at, x * scale * weight, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """float32 [..., N] -> float32 [..., N]."""
    return _launch(x, x, weight, eps, add=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then rms_norm(residual). Both float32 [T, N]."""
    return _launch(x, residual, weight, eps, add=True)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, add: bool) -> Tensor:
    out = torch.empty_like(x)
    cols = weight.shape[0]
    block = triton.next_power_of_2(cols)
    # a row stays in registers: at most 32 numbers a thread, and one warp for a head
    warps = min(16, max(1, block // 1024))
    rms_norm_kernel[(x.numel() // cols,)](
        x, residual, weight, out, cols, eps, ADD=add, BLOCK=block, num_warps=warps
    )
    return out


_SIGNATURE = {
    "x_ptr": "*fp32",
    "residual_ptr": "*fp32",
    "weight_ptr": "*fp32",
    "out_ptr": "*fp32",
    "cols": "i32",
    "eps": "fp32",
}
COMPILE_CASES = [
    CompileCase(
        "rms_norm_head", rms_norm_kernel, _SIGNATURE, {"ADD": False, "BLOCK": 128}, {"num_warps": 1}
    ),
    CompileCase(
        "add_rms_norm", rms_norm_kernel, _SIGNATURE, {"ADD": True, "BLOCK": 4096}, {"num_warps": 4}
    ),
]
