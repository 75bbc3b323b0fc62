"""Q4_K: 256 numbers in 8 sub-blocks of 32 with 4-bit codes: q * (d * scale) - dmin * minimum.

32 bytes hold one sub-block in their low and the next one in their high nibbles.
"""

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
    codes = load_bytes(codes_ptr, row + group * 32, mask, 32)
    offsets = rows.to(tl.int64)[:, None] * scale_row_stride + group // 4 * 16
    w0, w1, w2, w3 = load_words(scales_ptr, offsets, mask)
    first = (group & 3) * 2
    scale, minimum = unpack(w0, w1, w2, w3, first)
    low = scale[:, :, None] * from_int(codes & 15) - minimum[:, :, None]
    scale, minimum = unpack(w0, w1, w2, w3, first + 1)
    high = scale[:, :, None] * from_int(codes >> 4) - minimum[:, :, None]
    return as_rows(as_halves(low, high))
