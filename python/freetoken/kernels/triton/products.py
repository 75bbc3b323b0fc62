"""Matrix products of tiles."""

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
