"""FP8_128: e4m3 codes, and a float32 scale for each 128 rows and 128 columns."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.formats.numbers import from_e4m3
from freetoken.kernels.triton.formats.units import load_units, load_x4, unit_numbers

HALFWAY = tl.constexpr(2.0**60)  # for x and for sums of codes that are 2^-120 of themselves


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
    mask = row_mask[:, None] & (k < cols)[None, :]
    offsets = rows.to(tl.int64)[:, None] * code_row_stride + k[None, :]
    numbers = from_e4m3(tl.load(codes_ptr + offsets, mask=mask, other=0))
    # BLOCK_K <= 128 columns have one scale.
    offsets = (rows // 128).to(tl.int64) * scale_row_stride + (k0 // 128) * 4
    pointers = (scales_ptr + offsets).to(tl.pointer_type(tl.float32))
    return numbers * tl.load(pointers, mask=row_mask, other=0.0)[:, None]


@triton.jit
def dot(codes, scales, row_mask, x_ptr, k0, cols, BLOCK_K: tl.constexpr):
    units, there, mask = unit_numbers(row_mask, k0, cols, BLOCK_K // 16, 16)
    words = load_units(codes, units * 16, mask)
    x0, x1, x2, x3 = load_x4(x_ptr, units * 16, there, 4, 8)
    sums = tl.fma(_last(words << 16), x1 * HALFWAY, _last(words << 24) * (x0 * HALFWAY))
    sums = tl.fma(_last(words << 8), x2 * HALFWAY, sums)
    sums = tl.fma(_last(words), x3 * HALFWAY, sums)
    # Bytes whose lower seven bits are all ones are no numbers.
    ones = ((words & 0x7F7F7F7F) + 0x01010101) & 0x80808080
    sums = tl.sum(tl.where(ones == 0, sums * HALFWAY, float("nan")), axis=2)
    pointers = (scales[:, None] + (units // 8 * 4)[None, :]).to(tl.pointer_type(tl.float32))
    return sums * tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _last(words):
    """The upper byte of each word as e4m3, times 2^-120: its bits in the places of a float32."""
    bits = (words.to(tl.int32, bitcast=True) >> 4) & -2014314496  # 0x87F00000
    return bits.to(tl.float32, bitcast=True)
