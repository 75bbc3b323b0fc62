"""Q5_K: as Q4_K, after 32 bytes whose bit i is the fifth bit of the codes of sub-block i."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.formats.k_scales import load_words, unpack
from freetoken.kernels.triton.formats.numbers import from_int
from freetoken.kernels.triton.formats.tiles import as_halves, as_rows, field_offsets, load_bytes


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
