"""NVFP4: 16 numbers are 8 bytes of e2m1 codes and one e4m3 scale.

`tile` reads GGUF's order, in halves, without negative zeros and with unsigned scales, `pairs_tile`
that of ModelOpt and compressed-tensors (NVFP4_PAIRS).
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.formats.numbers import from_e2m1, from_e4m3, from_e4m3_unsigned
from freetoken.kernels.triton.formats.tiles import (
    as_halves,
    as_pairs,
    as_rows,
    field_offsets,
    load_bytes,
)
from freetoken.kernels.triton.formats.units import e2m1_dot, load_units, load_x4, unit_numbers


@triton.jit
def tile(
    codes_ptr,
    scales_ptr,
    rows,
    row_mask,
    k0,
    cols,
    code_row_stride,
    scale_row_stride,
    BLOCK_K: tl.constexpr,
):
    row, block, mask = field_offsets(rows, row_mask, code_row_stride, k0, cols, BLOCK_K // 16, 16)
    codes = load_bytes(codes_ptr, row + block * 8, mask, 8)
    numbers = as_halves(from_e2m1(codes & 15), from_e2m1(codes >> 4)) + 0.0  # -0 + 0 is 0
    offsets = rows.to(tl.int64)[:, None] * scale_row_stride + block
    scales = from_e4m3_unsigned(tl.load(scales_ptr + offsets, mask=mask, other=0))
    return as_rows(numbers * scales[:, :, None])


@triton.jit
def pairs_tile(
    codes_ptr,
    scales_ptr,
    rows,
    row_mask,
    k0,
    cols,
    code_row_stride,
    scale_row_stride,
    BLOCK_K: tl.constexpr,
):
    row, block, mask = field_offsets(rows, row_mask, code_row_stride, k0, cols, BLOCK_K // 16, 16)
    codes = load_bytes(codes_ptr, row + block * 8, mask, 8)
    numbers = as_pairs(from_e2m1(codes & 15), from_e2m1(codes >> 4))
    offsets = rows.to(tl.int64)[:, None] * scale_row_stride + block
    scales = from_e4m3(tl.load(scales_ptr + offsets, mask=mask, other=0))
    return as_rows(numbers * scales[:, :, None])


@triton.jit
def dot(codes, scales, row_mask, x_ptr, k0, cols, BLOCK_K: tl.constexpr):
    units, there, mask = unit_numbers(row_mask, k0, cols, BLOCK_K // 32, 32)
    words = load_units(codes, units * 16, mask)
    a0, a1, a2, a3 = load_x4(x_ptr, units * 32, there, 4, 16)
    b0, b1, b2, b3 = load_x4(x_ptr, units * 32 + 8, there, 4, 16)
    sums = e2m1_dot(words, a0, b0, a1, b1, a2, b2, a3, b3)
    return _times_scales(sums, scales, units, mask, from_e4m3_unsigned)


@triton.jit
def pairs_dot(codes, scales, row_mask, x_ptr, k0, cols, BLOCK_K: tl.constexpr):
    units, there, mask = unit_numbers(row_mask, k0, cols, BLOCK_K // 32, 32)
    words = load_units(codes, units * 16, mask)
    a0, a1, a2, a3 = load_x4(x_ptr, units * 32, there, 8, 16)
    b0, b1, b2, b3 = load_x4(x_ptr, units * 32 + 4, there, 8, 16)
    sums = e2m1_dot(words, a0, a1, a2, a3, b0, b1, b2, b3)
    return _times_scales(sums, scales, units, mask, from_e4m3)


@triton.jit
def _times_scales(sums, scales, units, mask, DECODE: tl.constexpr):
    """Sums of words, two of which have a scale: [ROWS, UNITS, 4] -> of units, [ROWS, UNITS]."""
    sums = tl.sum(tl.reshape(sums, (sums.shape[0], sums.shape[1], 2, 2)), axis=3)
    pointers = (scales[:, None] + units[None, :] * 2)[:, :, None] + tl.arange(0, 2)[None, None, :]
    return tl.sum(sums * DECODE(tl.load(pointers, mask=mask[:, :, None], other=0)), axis=2)
