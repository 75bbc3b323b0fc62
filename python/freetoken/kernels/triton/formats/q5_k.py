"""Q5_K: as Q4_K, after 32 bytes whose bit i is the fifth bit of the codes of sub-block i."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.formats.k_scales import load_words, scaled_sums, unpack
from freetoken.kernels.triton.formats.numbers import from_int
from freetoken.kernels.triton.formats.tiles import as_halves, as_rows, field_offsets, load_bytes
from freetoken.kernels.triton.formats.units import (
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
    row, group, mask = field_offsets(rows, row_mask, code_row_stride, k0, cols, BLOCK_K // 64, 64)
    block = row + group // 4 * 160
    codes = load_bytes(codes_ptr, block + 32 + (group & 3) * 32, mask, 32)
    first = (group & 3) * 2
    fifths = load_bytes(codes_ptr, block, mask, 32).to(tl.int32) >> first[:, :, None]
    offsets = rows.to(tl.int64)[:, None] * scale_row_stride + group // 4 * 16
    w0, w1, w2, w3 = load_words(scales_ptr, offsets, mask)
    scale, minimum = unpack(w0, w1, w2, w3, first)
    q = (codes & 15).to(tl.int32) | ((fifths & 1) << 4)
    low = scale[:, :, None] * from_int(q) - minimum[:, :, None]
    scale, minimum = unpack(w0, w1, w2, w3, first + 1)
    q = (codes >> 4).to(tl.int32) | ((fifths & 2) << 3)
    high = scale[:, :, None] * from_int(q) - minimum[:, :, None]
    return as_rows(as_halves(low, high))


@triton.jit
def dot(codes, scales, row_mask, x_ptr, k0, cols, BLOCK_K: tl.constexpr):
    # Units as in Q4_K.
    units, there, mask = unit_numbers(row_mask, k0, cols, BLOCK_K // 32, 32)
    words = load_units(codes, units // 8 * 160 + 32 + (units & 7) * 16, mask)
    fifths = load_units(codes, units // 8 * 160 + (units & 1) * 16, mask)
    fifths = fifths >> (units & 6)[None, :, None]
    starts = units // 2 * 64 + (units & 1) * 16
    a0, a1, a2, a3 = load_x4(x_ptr, starts, there, 4, 8)
    b0, b1, b2, b3 = load_x4(x_ptr, starts + 32, there, 4, 8)
    low = (words & 0x0F0F0F0F) | ((fifths << 4) & 0x10101010)
    high = ((words >> 4) & 0x0F0F0F0F) | ((fifths << 3) & 0x10101010)
    low = tl.sum(bytes_dot(low, a0, a1, a2, a3), axis=2)
    high = tl.sum(bytes_dot(high, b0, b1, b2, b3), axis=2)
    low_x = tl.sum(sum4(a0, a1, a2, a3), axis=2)
    high_x = tl.sum(sum4(b0, b1, b2, b3), axis=2)
    return scaled_sums(low, high, low_x, high_x, scales, units, mask)
