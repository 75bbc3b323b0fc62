"""Q8_0: a block of 32 is 32 int8 codes q and a binary16 d; a number is q * d."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.formats.numbers import from_int, load_halves
from freetoken.kernels.triton.formats.tiles import as_rows, field_offsets, load_bytes


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
