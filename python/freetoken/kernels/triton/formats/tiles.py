"""Shapes that the tiles of all formats share.

Every format has a function

    tile(codes_ptr, scales_ptr, rows, row_mask, k0, cols,
         code_row_stride, scale_row_stride, BLOCK_K) -> float32 [ROWS, BLOCK_K]

of columns k0 .. k0 + BLOCK_K - 1 of the rows `rows` [ROWS] of a matrix in two planes, whose rows
lie `code_row_stride` and `scale_row_stride` bytes apart. Both pointers are to uint8; that of the
codes is aligned to 16 bytes, that of the scales to 4. Numbers are zero where `row_mask` [ROWS] is
false and from column `cols` on, and nothing is read there. BLOCK_K is a power of two within the
bounds of the format's table entry, and k0 a multiple of it. The bits are those of
`WeightFormat.dequantize_planes`, whether or not the compiler fuses products and sums: wherever a
product is added to, it is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def field_offsets(
    rows, row_mask, row_stride, k0, cols, FIELDS: tl.constexpr, ELEMENTS: tl.constexpr
):
    """For FIELDS runs of ELEMENTS columns from k0 on: where each row begins, int64 [ROWS, 1], the
    number of each run, [1, FIELDS], and whether it is there, [ROWS, FIELDS]."""
    fields = k0 // ELEMENTS + tl.arange(0, FIELDS)
    mask = row_mask[:, None] & (fields * ELEMENTS < cols)[None, :]
    return rows.to(tl.int64)[:, None] * row_stride, fields[None, :], mask


@triton.jit
def load_bytes(ptr, offsets, mask, BYTES: tl.constexpr):
    """BYTES consecutive bytes from each offset: [ROWS, FIELDS] -> uint8 [ROWS, FIELDS, BYTES]."""
    pointers = ptr + offsets[:, :, None] + tl.arange(0, BYTES)[None, None, :]
    return tl.load(pointers, mask=mask[:, :, None], other=0)


@triton.jit
def as_halves(low, high):
    """[ROWS, FIELDS, n] twice -> [ROWS, FIELDS, 2n], first all of low, then all of high."""
    both = tl.permute(tl.join(low, high), (0, 1, 3, 2))
    return tl.reshape(both, (low.shape[0], low.shape[1], 2 * low.shape[2]))


@triton.jit
def as_pairs(low, high):
    """[ROWS, FIELDS, n] twice -> [ROWS, FIELDS, 2n], alternating."""
    return tl.reshape(tl.join(low, high), (low.shape[0], low.shape[1], 2 * low.shape[2]))


@triton.jit
def as_rows(numbers):
    """[ROWS, FIELDS, n] -> [ROWS, FIELDS * n]."""
    return tl.reshape(numbers, (numbers.shape[0], numbers.shape[1] * numbers.shape[2]))
