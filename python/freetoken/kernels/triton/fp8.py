"""The FP8 round trip that DeepSeek's experts were trained with (DS_FP4)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.compile_cases import CompileCase

BLOCK = 128  # numbers that share a scale


@triton.jit
def round_to_fp8(x):
    """One block: rounded to e4m3 times the least power of two that keeps it within 448.

    In arithmetic, since not every GPU converts to FP8: adding and subtracting a number whose last
    place is the step of e4m3 rounds to it. What is not finite makes its block NaN.
    """
    largest = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-4) * (1.0 / 448.0)
    bits = (largest.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    scale = bits.to(tl.float32, bitcast=True)
    v = x / scale
    v = tl.maximum(tl.minimum(v, 448.0), -448.0)
    power = (v.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    anchor = tl.maximum(power, 2.0**-6) * (1.5 * 2.0**20)
    return ((v + anchor) - anchor) * scale + tl.sum(0.0 * x, axis=0)


@triton.jit
def fp8_rounded_kernel(x_ptr, out_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * cols
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row + at, mask=at < cols, other=0.0)
    tl.store(out_ptr + row + at, round_to_fp8(x), mask=at < cols)


def fp8_rounded(x: Tensor) -> Tensor:
    """float32 [T, N] -> float32 [T, N], each 128 columns by themselves."""
    tokens, cols = x.shape
    out = torch.empty_like(x)
    fp8_rounded_kernel[(tokens, triton.cdiv(cols, BLOCK))](x, out, cols, BLOCK=BLOCK, num_warps=1)
    return out


COMPILE_CASES = [
    CompileCase(
        "fp8_rounded",
        fp8_rounded_kernel,
        {"x_ptr": "*fp32", "out_ptr": "*fp32", "cols": "i32"},
        {"BLOCK": BLOCK},
        {"num_warps": 1},
    )
]
