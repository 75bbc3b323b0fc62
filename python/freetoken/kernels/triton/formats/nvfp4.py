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
