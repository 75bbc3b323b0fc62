"""F16: plain numbers."""

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
    pointers = starts.to(tl.pointer_type(tl.float16)) + k[None, :]
    mask = row_mask[:, None] & (k < cols)[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
