"""Q6_K: 256 numbers in 16 sub-blocks of 16 with 6-bit codes: (q - 32) * (d * scale).

Each half of 128 numbers has 64 bytes, whose byte j holds the lower four bits of elements j and
j + 64, and 32 bytes, whose byte j holds the upper two of elements j, j + 32, j + 64 and j + 96.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.formats.numbers import from_int, load_halves
from freetoken.kernels.triton.formats.tiles import as_halves, as_rows, field_offsets, load_bytes
from freetoken.kernels.triton.formats.units import (
    UNSCALE,
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
    # Runs of 32 bytes: two share their upper bits, and make a half.
    row, run, mask = field_offsets(rows, row_mask, code_row_stride, k0, cols, BLOCK_K // 64, 64)
    block = row + run // 4 * 192
    codes = load_bytes(codes_ptr, block + (run & 3) * 32, mask, 32).to(tl.int32)
    upper = load_bytes(codes_ptr, block + 128 + (run & 2) * 16, mask, 32).to(tl.int32)
    upper = upper >> ((run & 1) * 2)[:, :, None]
    low = from_int((codes & 15) | ((upper & 3) << 4)) - 32.0
    high = from_int((codes >> 4) | (upper & 48)) - 32.0
    # [ROWS, halves, 2 runs, 32] twice -> [ROWS, halves, 128], first all of low
    HALVES: tl.constexpr = BLOCK_K // 128
    shape: tl.constexpr = (rows.shape[0], HALVES, 64)
    numbers = as_halves(tl.reshape(low, shape), tl.reshape(high, shape))
    return as_rows(
        _scaled(numbers, scales_ptr, rows, row_mask, k0, cols, scale_row_stride, BLOCK_K)
    )


@triton.jit
def _scaled(numbers, scales_ptr, rows, row_mask, k0, cols, row_stride, BLOCK_K: tl.constexpr):
    """Times d * scale: [ROWS, halves, 128] -> [ROWS, sub-blocks, 16]."""
    row, sub, mask = field_offsets(rows, row_mask, row_stride, k0, cols, BLOCK_K // 16, 16)
    block = row + sub // 16 * 18
    scales = tl.load(scales_ptr + block + (sub & 15), mask=mask, other=0).to(tl.int32)
    scales = (from_int(scales ^ 0x80) - 128.0) * load_halves(scales_ptr, block + 16, mask)
    shape: tl.constexpr = (rows.shape[0], BLOCK_K // 16, 16)
    return tl.reshape(numbers, shape) * scales[:, :, None]


@triton.jit
def dot(codes, scales, row_mask, x_ptr, k0, cols, BLOCK_K: tl.constexpr):
    # A unit is 16 numbers of each quarter of a half: 32 bytes of lower bits, 16 of upper ones.
    units, there, mask = unit_numbers(row_mask, k0, cols, BLOCK_K // 64, 64)
    block, chunk = units // 4 * 192, (units & 1) * 16
    low = block + (units & 2) * 32 + chunk
    first = load_units(codes, low, mask)
    second = load_units(codes, low + 32, mask)
    upper = load_units(codes, block + 128 + (units & 2) * 16 + chunk, mask)
    x_starts = units // 2 * 128 + chunk
    scale = units // 4 * 18 + (units & 2) * 4 + (units & 1)

    q = (first & 0x0F0F0F0F) | ((upper << 4) & 0x30303030)
    total = _quarter(q, x_ptr, x_starts, there, scales, scale, mask)
    q = (second & 0x0F0F0F0F) | ((upper << 2) & 0x30303030)
    total += _quarter(q, x_ptr, x_starts + 32, there, scales, scale + 2, mask)
    q = ((first >> 4) & 0x0F0F0F0F) | (upper & 0x30303030)
    total += _quarter(q, x_ptr, x_starts + 64, there, scales, scale + 4, mask)
    q = ((second >> 4) & 0x0F0F0F0F) | ((upper >> 2) & 0x30303030)
    total += _quarter(q, x_ptr, x_starts + 96, there, scales, scale + 6, mask)
    d = load_halves(scales[:, None], (units // 4 * 18 + 16)[None, :], mask)
    return total * (d * UNSCALE)


@triton.jit
def _quarter(q, x_ptr, x_starts, there, scales, offsets, mask):
    """16 numbers of a sub-block with its scale, over d * 2^85: [ROWS, UNITS]."""
    x0, x1, x2, x3 = load_x4(x_ptr, x_starts, there, 4, 8)
    start = sum4(x0, x1, x2, x3) * (-32.0 / UNSCALE)
    sums = tl.sum(bytes_dot(q, x0, x1, x2, x3) + start, axis=2)
    scale = tl.load(scales[:, None] + offsets[None, :], mask=mask, other=0).to(tl.int32)
    return sums * (from_int(scale ^ 0x80) - 128.0)
