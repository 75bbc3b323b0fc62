"""The 6-bit scales and minima of Q4_K and Q5_K, 16 bytes for 256 numbers.

d and dmin as binary16, then 12 bytes in which sub-block i of 32 finds its scale and minimum; see
`freetoken.formats.k_scales`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.formats.numbers import from_int
from freetoken.kernels.triton.formats.units import UNSCALE


@triton.jit
def load_words(ptr, offsets, mask):
    """The four words of each field: four uint32 of the shape of `offsets`."""
    words = (ptr + offsets).to(tl.pointer_type(tl.uint32))
    w0 = tl.load(words, mask=mask, other=0)
    w1 = tl.load(words + 1, mask=mask, other=0)
    w2 = tl.load(words + 2, mask=mask, other=0)
    w3 = tl.load(words + 3, mask=mask, other=0)
    return w0, w1, w2, w3


@triton.jit
def half(bits):
    """The lower 16 bits as binary16 -> float32."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def unpack(w0, w1, w2, w3, sub):
    """d * scale and dmin * minimum of sub-block `sub` (0..7): both float32."""
    shift = (sub & 3) * 8
    first, second, low = w1 >> shift, w2 >> shift, w3 >> shift
    scale = tl.where(sub < 4, first & 63, (low & 15) | ((first >> 2) & 48))
    minimum = tl.where(sub < 4, second & 63, ((low >> 4) & 15) | ((second >> 2) & 48))
    return half(w0) * from_int(scale), half(w0 >> 16) * from_int(minimum)


@triton.jit
def scaled_sums(low, high, low_x, high_x, scales, units, mask):
    """Sums of a unit's codes times x / 2^85, and of x, in the sub-blocks 2p and 2p + 1: their sum
    with the scales and minima of these. Units of 32, [ROWS, UNITS] (x: [1, UNITS])."""
    offsets = units // 8 * 16
    w0, w1, w2, w3 = load_words(scales[:, None], offsets[None, :], mask)
    first = (units & 6)[None, :]
    scale, minimum = unpack(w0, w1, w2, w3, first)
    total = low * (scale * UNSCALE) - low_x * minimum
    scale, minimum = unpack(w0, w1, w2, w3, first + 1)
    return total + (high * (scale * UNSCALE) - high_x * minimum)
