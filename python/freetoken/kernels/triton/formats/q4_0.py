"""Q4_0: a block of 32 is 16 bytes of codes q in halves and a binary16 d: (q - 8) * d."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.formats.numbers import from_int, load_halves
from freetoken.kernels.triton.formats.tiles import as_halves, as_rows, field_offsets, load_bytes
from freetoken.kernels.triton.formats.units import (
    UNSCALE,
    load_units,
    load_x4,
    low_nibbles_dot,
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
    codes = load_bytes(codes_ptr, row + block * 16, mask, 16)
    numbers = as_halves(from_int(codes & 15), from_int(codes >> 4)) - 8.0
    scales = load_halves(
        scales_ptr, rows.to(tl.int64)[:, None] * scale_row_stride + block * 2, mask
    )
    return as_rows(numbers * scales[:, :, None])


@triton.jit
def dot(codes, scales, row_mask, x_ptr, k0, cols, BLOCK_K: tl.constexpr):
    units, there, mask = unit_numbers(row_mask, k0, cols, BLOCK_K // 32, 32)
    words = load_units(codes, units * 16, mask)
    a0, a1, a2, a3 = load_x4(x_ptr, units * 32, there, 4, 8)
    b0, b1, b2, b3 = load_x4(x_ptr, units * 32 + 16, there, 4, 8)
    start = (sum4(a0, a1, a2, a3) + sum4(b0, b1, b2, b3)) * (-8.0 / UNSCALE)
    sums = low_nibbles_dot(words, a0, a1, a2, a3) + low_nibbles_dot(words >> 4, b0, b1, b2, b3)
    sums = tl.sum(sums + start, axis=2)
    return sums * (load_halves(scales[:, None], units[None, :] * 2, mask) * UNSCALE)
