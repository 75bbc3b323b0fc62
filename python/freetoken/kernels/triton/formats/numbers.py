"""From bits to float32, exactly and without the slow integer conversion of GPUs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_int(q):
    """A whole number 0 <= q < 2^22 as float32: it is put into the mantissa of 2^23."""
    bits = q.to(tl.int32) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def from_e2m1(q):
    """A 4-bit code 0..15: a sign, two bits of exponent, one of mantissa.

    In the places of a float32 they mean 2^-126 of the number, subnormals included.
    """
    q = q.to(tl.int32)
    magnitude = ((q & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return (magnitude.to(tl.int32, bitcast=True) | ((q & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def from_e8m0(x):
    """2^(x - 127) of a byte x; 255 is no number."""
    x = x.to(tl.int32)
    bits = tl.where(x == 0, 0x00400000, tl.where(x == 255, 0x7FC00000, x << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_magnitude(x):
    """The lower 7 bits of an e4m3 byte, 480 for all ones."""
    return ((x.to(tl.int32) & 0x7F) << 20).to(
        tl.float32, bitcast=True
    ) * 1.329227995784916e36  # 2^120


@triton.jit
def from_e4m3(x):
    """An e4m3 byte; 0x7F and 0xFF are no numbers."""
    x = x.to(tl.int32)
    magnitude = tl.where((x & 0x7F) == 0x7F, float("nan"), e4m3_magnitude(x))
    return (magnitude.to(tl.int32, bitcast=True) | ((x & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def from_e4m3_unsigned(x):
    """An e4m3 byte as GGUF reads it: without its sign, 0x7F is zero and 0xFF is 480."""
    return tl.where(x.to(tl.int32) == 0x7F, 0.0, e4m3_magnitude(x))


@triton.jit
def load_halves(ptr, offsets, mask):
    """binary16 numbers at even byte offsets, as float32; zero where masked."""
    pointers = (ptr + offsets).to(tl.pointer_type(tl.float16))
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
