"""The 6-bit scales and minima of Q4_K and Q5_K."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import Bytes, Float32

SCALE_BYTES = 16


def unpack_scales(fields: Bytes) -> tuple[Float32, Float32]:
    """Scales and minima of 8 sub-blocks of 32: uint8 [..., 16] -> two float32 [..., 8].

    d and dmin as binary16, then 12 bytes: of sub-blocks 0..3 the scales stand in the low 6 bits of
    bytes 0..3 and the minima in those of bytes 4..7; of sub-blocks 4..7 bytes 8..11 have the low
    4 bits (scale in the low nibble, minimum in the high one), and the top 2 bits of bytes 0..3 and
    4..7 the others.
    """
    d = fields[..., 0:2].copy().view("<f2").astype(np.float32)
    dmin = fields[..., 2:4].copy().view("<f2").astype(np.float32)
    first, second, low = fields[..., 4:8], fields[..., 8:12], fields[..., 12:16]
    scales = np.concatenate([first & 63, (low & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (low >> 4) | (second >> 6 << 4)], axis=-1)
    with np.errstate(invalid="ignore"):
        return d * scales.astype(np.float32), dmin * minima.astype(np.float32)


def scaled(codes: Bytes, fields: Bytes) -> Float32:
    """q * (d * scale) - dmin * minimum: codes uint8 [..., 8, 32] -> float32 [..., 256]."""
    scales, minima = unpack_scales(fields)
    with np.errstate(invalid="ignore"):
        numbers = scales[..., None] * codes.astype(np.float32) - minima[..., None]
    return numbers.reshape(*numbers.shape[:-2], 256)
