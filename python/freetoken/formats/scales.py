"""Scales of one byte: e8m0 (a power of two) and e4m3 (FP8)."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import Bytes, Float32


def _e8m0_table() -> Float32:
    """2^(x - 127), exact down to the subnormal 2^-127; 255 is NaN."""
    powers = np.ldexp(np.float64(1), np.arange(256) - 127)
    powers[255] = np.nan
    table: Float32 = powers.astype(np.float32)
    return table


def _e4m3_table() -> Float32:
    """Bias 7, subnormals in units of 2^-9, largest 448; 0x7F and 0xFF are NaN, none is infinite."""
    bits = np.arange(128)
    exponent, mantissa = bits >> 3, bits & 7
    magnitude = np.where(
        exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10)
    )
    magnitude[127] = np.nan
    return np.concatenate([magnitude, -magnitude]).astype(np.float32)


E8M0 = _e8m0_table()
E4M3 = _e4m3_table()


def decode_e8m0(scales: Bytes) -> Float32:
    """uint8 [...] -> float32 [...]."""
    decoded: Float32 = E8M0[scales]
    return decoded


def decode_e4m3(codes: Bytes) -> Float32:
    """uint8 [...] -> float32 [...]."""
    decoded: Float32 = E4M3[codes]
    return decoded
