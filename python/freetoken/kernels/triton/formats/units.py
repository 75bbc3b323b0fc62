"""Shapes that the dot products of all formats share.

Every format has a function

    dot(codes, scales, row_mask, x_ptr, k0, cols, BLOCK_K) -> float32 [ROWS, BLOCK_K // unit]

the products of columns k0 .. k0 + BLOCK_K - 1 of some rows with the same columns of x, float32
[cols], in sums of `unit` columns each; add them up over columns, then along the last dimension.
`codes` and `scales` are pointers to uint8 [ROWS], where the planes of each row begin. What `tile`
takes as zero counts as zero here.

It is made for one row of x, where reading weights is all the time that there should be and a GPU
has four or five instructions for each 4-bit number: a thread reads 16 bytes at once (a unit), looks
at each number only by masking it out of its word, and multiplies by a scale once for a unit. Bits
that are masked out are a float32 already: an integer q in the lowest places is q * 2^-149, a
subnormal, which GPUs multiply as fast as others. So that products are normal numbers, x is scaled
by 2^64: an |x| of 2^64 and more becomes infinite, and what is below 2^-64 of sums is lost.
"""

from __future__ import annotations

import triton
import triton.language as tl

X_SCALE = tl.constexpr(2.0**64)
UNSCALE = tl.constexpr(2.0**85)  # times X_SCALE: 2^149


@triton.jit
def unit_numbers(row_mask, k0, cols, UNITS: tl.constexpr, UNIT: tl.constexpr):
    """Numbers of the units of UNIT columns, [UNITS]; which are there, [UNITS] and [ROWS, UNITS]."""
    units = k0 // UNIT + tl.arange(0, UNITS)
    there = units * UNIT < cols
    return units, there, row_mask[:, None] & there[None, :]


@triton.jit
def load_units(starts, offsets, mask):
    """Four words at byte offsets [UNITS] from each of `starts` [ROWS]: uint32 [ROWS, UNITS, 4]."""
    pointers = (starts[:, None] + offsets[None, :]).to(tl.pointer_type(tl.uint32))
    pointers = pointers[:, :, None] + tl.arange(0, 4)[None, None, :]
    return tl.load(pointers, mask=mask[:, :, None], other=0)


@triton.jit
def load_x4(x_ptr, starts, mask, STRIDE: tl.constexpr, PAIR_STRIDE: tl.constexpr):
    """x[starts + i ..] for each of four words, which are STRIDE columns apart in a pair, and pairs
    PAIR_STRIDE: i = 0..3 as four tensors [1, UNITS, 4]."""
    words = (tl.arange(0, 4) & 1) * STRIDE + (tl.arange(0, 4) >> 1) * PAIR_STRIDE
    offsets = starts[:, None, None] + words[None, :, None] + tl.arange(0, 4)[None, None, :]
    x = tl.load(x_ptr + offsets, mask=mask[:, None, None], other=0.0)
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0[None], x1[None], x2[None], x3[None]


@triton.jit
def sum4(x0, x1, x2, x3):
    """[1, UNITS, 4] each."""
    return (x0 + x1) + (x2 + x3)


@triton.jit
def small(bits):
    """Integers as they are: q * 2^-149."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def low_nibbles_dot(words, x0, x1, x2, x3):
    """The sum of the low nibble of byte i times x_i / 2^85: [ROWS, UNITS, 4]."""
    upper = words >> 16
    total = small(words & 0xF) * (x0 * X_SCALE)
    total = tl.fma(small(words & 0xF00), x1 * (X_SCALE / 256), total)
    total = tl.fma(small(upper & 0xF), x2 * X_SCALE, total)
    return tl.fma(small(upper & 0xF00), x3 * (X_SCALE / 256), total)


@triton.jit
def bytes_dot(words, x0, x1, x2, x3):
    """The sum of byte i times x_i / 2^85: [ROWS, UNITS, 4]."""
    upper = words >> 16
    total = small(words & 0xFF) * (x0 * X_SCALE)
    total = tl.fma(small(words & 0xFF00), x1 * (X_SCALE / 256), total)
    total = tl.fma(small(upper & 0xFF), x2 * X_SCALE, total)
    return tl.fma(small(upper & 0xFF00), x3 * (X_SCALE / 256), total)


@triton.jit
def e2m1_dot(words, x0, x1, x2, x3, x4, x5, x6, x7):
    """The sum of e2m1 nibble i times x_i: [ROWS, UNITS, 4].

    Nibbles k and k + 4 stand 16 bits apart; their bits in the places of two binary16 numbers are
    2^-14 of them.
    """
    low, high = _two_e2m1(words << 12)
    total = tl.fma(high, x4, low * x0)
    low, high = _two_e2m1(words << 8)
    total = tl.fma(high, x5, tl.fma(low, x1, total))
    low, high = _two_e2m1(words << 4)
    total = tl.fma(high, x6, tl.fma(low, x2, total))
    low, high = _two_e2m1(words)
    return tl.fma(high, x7, tl.fma(low, x3, total)) * 16384.0


@triton.jit
def _two_e2m1(words):
    """The nibbles at bits 12 and 28, times 2^-14: two float32 tensors."""
    both = (words & 0x80008000) | ((words >> 3) & 0x0E000E00)
    low = both.to(tl.uint16).to(tl.float16, bitcast=True)
    high = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)
