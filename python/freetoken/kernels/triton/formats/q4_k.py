"""Q4_K: 256 numbers in 8 sub-blocks of 32 with 4-bit codes: q * (d * scale) - dmin * minimum.

32 bytes hold one sub-block in their low and the next one in their high nibbles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.formats.k_scales import load_words, scaled_sums, unpack
from freetoken.kernels.triton.formats.numbers import from_int
from freetoken.kernels.triton.formats.tiles import as_halves, as_rows, field_offsets, load_bytes
from freetoken.kernels.triton.formats.units import (
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
    row, group, mask = field_offsets(rows, row_mask, code_row_stride, k0, cols, BLOCK_K // 64, 64)
    codes = load_bytes(codes_ptr, row + group * 32, mask, 32)
    offsets = rows.to(tl.int64)[:, None] * scale_row_stride + group // 4 * 16
    w0, w1, w2, w3 = load_words(scales_ptr, offsets, mask)
    first = (group & 3) * 2
    scale, minimum = unpack(w0, w1, w2, w3, first)
    low = scale[:, :, None] * from_int(codes & 15) - minimum[:, :, None]
    scale, minimum = unpack(w0, w1, w2, w3, first + 1)
    high = scale[:, :, None] * from_int(codes >> 4) - minimum[:, :, None]
    return as_rows(as_halves(low, high))


@triton.jit
def dot(codes, scales, row_mask, x_ptr, k0, cols, BLOCK_K: tl.constexpr):
    # A unit is half of the 32 bytes, with 16 numbers of each of two sub-blocks.
    units, there, mask = unit_numbers(row_mask, k0, cols, BLOCK_K // 32, 32)
    words = load_units(codes, units * 16, mask)
    starts = units // 2 * 64 + (units & 1) * 16
    a0, a1, a2, a3 = load_x4(x_ptr, starts, there, 4, 8)
    b0, b1, b2, b3 = load_x4(x_ptr, starts + 32, there, 4, 8)
    low = tl.sum(low_nibbles_dot(words, a0, a1, a2, a3), axis=2)
    high = tl.sum(low_nibbles_dot(words >> 4, b0, b1, b2, b3), axis=2)
    low_x = tl.sum(sum4(a0, a1, a2, a3), axis=2)
    high_x = tl.sum(sum4(b0, b1, b2, b3), axis=2)
    return scaled_sums(low, high, low_x, high_x, scales, units, mask)
