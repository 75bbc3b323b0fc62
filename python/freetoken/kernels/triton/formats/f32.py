"""F32: plain numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.formats.units import unit_numbers


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
    k = k0 + tl.arange(0, BLOCK_K)
    starts = codes_ptr + rows.to(tl.int64)[:, None] * code_row_stride
    pointers = starts.to(tl.pointer_type(tl.float32)) + k[None, :]
    mask = row_mask[:, None] & (k < cols)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def dot(codes, scales, row_mask, x_ptr, k0, cols, BLOCK_K: tl.constexpr):
    units, there, mask = unit_numbers(row_mask, k0, cols, BLOCK_K // 4, 4)
    columns = units[:, None] * 4 + tl.arange(0, 4)[None, :]
    pointers = codes.to(tl.pointer_type(tl.float32))[:, None, None] + columns[None]
    numbers = tl.load(pointers, mask=mask[:, :, None], other=0)
    x = tl.load(x_ptr + columns, mask=there[:, None], other=0.0)
    return tl.sum(numbers * x[None], axis=2)
