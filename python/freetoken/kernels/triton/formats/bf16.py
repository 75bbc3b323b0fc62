"""BF16: plain numbers, the upper halves of float32 ones."""

from __future__ import annotations

import triton
import triton.language as tl


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
