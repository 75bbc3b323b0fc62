"""Products of tiles, and of rows with one vector."""

from __future__ import annotations

import triton
import triton.language as tl

# Of every launch with products: a product that is added to is not rounded first. Compilers do so by
# default; results are not to change with that.
FUSED = {"enable_fp_fusion": True}

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, sums):
    """sums + a @ b, added in float32: of bfloat16 tiles on tensor cores, of float32 ones exactly.

    The interpreter cannot multiply bfloat16, but a product of two is exact in float32.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def row_products(
    codes_ptr,
    scales_ptr,
    rows,
    row_mask,
    x_ptr,
    cols,
    code_stride,
    scale_stride,
    DOT: tl.constexpr,
    TILE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    WHOLE_UNITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows of a matrix in two planes times x, float32 [cols], in float32: [ROWS]. `rows` are wide
    enough for offsets of bytes. With a last unit that is not whole, DOT cannot be used."""
    if WHOLE_UNITS:
        codes = codes_ptr + rows * code_stride
        scales = scales_ptr + rows // SCALE_ROWS * scale_stride
        sums = DOT(codes, scales, row_mask, x_ptr, 0, cols, BLOCK_K)
        for k0 in tl.range(BLOCK_K, cols, BLOCK_K):
            sums += DOT(codes, scales, row_mask, x_ptr, k0, cols, BLOCK_K)
    else:
        sums = tl.zeros([rows.shape[0], BLOCK_K], tl.float32)
        for k0 in tl.range(0, cols, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + k, mask=k < cols, other=0.0)
            w = TILE(
                codes_ptr, scales_ptr, rows, row_mask, k0, cols, code_stride, scale_stride, BLOCK_K
            )
            sums += w * x[None, :]
    return tl.sum(sums, axis=1)
