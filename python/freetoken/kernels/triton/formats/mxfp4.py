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
