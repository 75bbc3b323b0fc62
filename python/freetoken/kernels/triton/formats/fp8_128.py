"""FP8_128: e4m3 codes, and a float32 scale for each 128 rows and 128 columns."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.formats.numbers import from_e4m3


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
