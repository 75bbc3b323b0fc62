"""MXFP4: a block of 32 is 16 bytes of e2m1 codes and one e8m0 scale.

`tile` reads GGUF's order, in halves and with no negative zero, `pairs_tile` that of gpt-oss and
DeepSeek (MXFP4_PAIRS, DS_FP4).
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.formats.numbers import from_e2m1, from_e8m0
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
    row, block, mask = field_offsets(rows, row_mask, code_row_stride, k0, cols, BLOCK_K // 32, 32)
    codes = load_bytes(codes_ptr, row + block * 16, mask, 16)
    numbers = as_halves(from_e2m1(codes & 15), from_e2m1(codes >> 4)) + 0.0  # -0 + 0 is 0
    offsets = rows.to(tl.int64)[:, None] * scale_row_stride + block
    scales = from_e8m0(tl.load(scales_ptr + offsets, mask=mask, other=0))
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
    row, block, mask = field_offsets(rows, row_mask, code_row_stride, k0, cols, BLOCK_K // 32, 32)
    codes = load_bytes(codes_ptr, row + block * 16, mask, 16)
    numbers = as_pairs(from_e2m1(codes & 15), from_e2m1(codes >> 4))
    offsets = rows.to(tl.int64)[:, None] * scale_row_stride + block
    scales = from_e8m0(tl.load(scales_ptr + offsets, mask=mask, other=0))
    return as_rows(numbers * scales[:, :, None])


@triton.jit
def dot(codes, scales, row_mask, x_ptr, k0, cols, BLOCK_K: tl.constexpr):
    units, there, mask = unit_numbers(row_mask, k0, cols, BLOCK_K // 32, 32)
    words = load_units(codes, units * 16, mask)
    a0, a1, a2, a3 = load_x4(x_ptr, units * 32, there, 4, 8)
    b0, b1, b2, b3 = load_x4(x_ptr, units * 32 + 16, there, 4, 8)
    sums = tl.sum(e2m1_dot(words, a0, b0, a1, b1, a2, b2, a3, b3), axis=2)
    scale = tl.load(scales[:, None] + units[None, :], mask=mask, other=0)
    return sums * from_e8m0(scale)


@triton.jit
def pairs_dot(codes, scales, row_mask, x_ptr, k0, cols, BLOCK_K: tl.constexpr):
    units, there, mask = unit_numbers(row_mask, k0, cols, BLOCK_K // 32, 32)
    words = load_units(codes, units * 16, mask)
    a0, a1, a2, a3 = load_x4(x_ptr, units * 32, there, 8, 16)
    b0, b1, b2, b3 = load_x4(x_ptr, units * 32 + 4, there, 8, 16)
    sums = tl.sum(e2m1_dot(words, a0, a1, a2, a3, b0, b1, b2, b3), axis=2)
    scale = tl.load(scales[:, None] + units[None, :], mask=mask, other=0)
    return sums * from_e8m0(scale)
