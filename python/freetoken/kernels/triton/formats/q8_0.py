"""Q8_0: a block of 32 is 32 int8 codes q and a binary16 d; a number is q * d."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.formats.numbers import from_int, load_halves
from freetoken.kernels.triton.formats.tiles import as_rows, field_offsets, load_bytes
from freetoken.kernels.triton.formats.units import (
    UNSCALE,
    bytes_dot,
    load_units,
    load_x4,
    sum4,
    unit_numbers,
)


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
    codes = load_bytes(codes_ptr, row + block * 32, mask, 32)
    numbers = from_int(codes.to(tl.int32) ^ 0x80) - 128.0
    scales = load_halves(
        scales_ptr, rows.to(tl.int64)[:, None] * scale_row_stride + block * 2, mask
    )
    return as_rows(numbers * scales[:, :, None])


@triton.jit
def dot(codes, scales, row_mask, x_ptr, k0, cols, BLOCK_K: tl.constexpr):
    units, there, mask = unit_numbers(row_mask, k0, cols, BLOCK_K // 16, 16)
    words = load_units(codes, units * 16, mask) ^ 0x80808080  # q + 128
    x0, x1, x2, x3 = load_x4(x_ptr, units * 16, there, 4, 8)
    start = sum4(x0, x1, x2, x3) * (-128.0 / UNSCALE)
    sums = tl.sum(bytes_dot(words, x0, x1, x2, x3) + start, axis=2)
    return sums * (load_halves(scales[:, None], units[None, :] // 2 * 2, mask) * UNSCALE)
