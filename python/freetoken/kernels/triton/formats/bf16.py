"""BF16: plain numbers, the upper halves of float32 ones."""

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
    pointers = starts.to(tl.pointer_type(tl.uint16)) + k[None, :]
    mask = row_mask[:, None] & (k < cols)[None, :]
    bits = tl.load(pointers, mask=mask, other=0)
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def dot(codes, scales, row_mask, x_ptr, k0, cols, BLOCK_K: tl.constexpr):
    units, there, mask = unit_numbers(row_mask, k0, cols, BLOCK_K // 8, 8)
    columns = units[:, None] * 8 + tl.arange(0, 8)[None, :]
    pointers = codes.to(tl.pointer_type(tl.uint16))[:, None, None] + columns[None]
    numbers = tl.load(pointers, mask=mask[:, :, None], other=0)
    x = tl.load(x_ptr + columns, mask=there[:, None], other=0.0)
    return tl.sum((numbers.to(tl.uint32) << 16).to(tl.float32, bitcast=True) * x[None], axis=2)
