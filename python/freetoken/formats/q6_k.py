"""Q6_K: 256 numbers in 16 sub-blocks of 16 with 6-bit codes: (q - 32) * (d * scale)."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import ByteRange, Bytes, Float32, WeightFormat

_PAIRS_OF_BITS = np.array([0, 2, 4, 6], np.uint8)[:, None]


class Q6_KFormat(WeightFormat):
    """210 bytes a block: 128 bytes of low nibbles, 64 bytes of the upper two bits, 16 int8 scales,
    d as binary16.

    Each half of 128 numbers has 64 and 32 of those bytes. Byte j of the 64 holds element j in its
    low and element j + 64 in its high nibble; byte j of the 32 holds the upper bits of elements
    j, j + 32, j + 64 and j + 96, lowest bits first.
    """

    def dequantize(self, rows: Bytes) -> Float32:
        blocks = self.blocks(rows)
        leading = blocks.shape[:-1]
        low = blocks[..., :128].reshape(*leading, 2, 64)
        low = np.stack([low & 15, low >> 4], axis=-2).reshape(*leading, 2, 4, 32)
        packed = blocks[..., 128:192].reshape(*leading, 2, 1, 32)
        high = ((packed >> _PAIRS_OF_BITS) & 3).astype(np.uint8)
        codes = (low | (high << 4)).astype(np.int8) - np.int8(32)
        scales = blocks[..., 192:208].view(np.int8).astype(np.float32)
        d = blocks[..., 208:].copy().view("<f2").astype(np.float32)
        with np.errstate(invalid="ignore"):
            numbers = (d * scales)[..., None] * codes.reshape(*leading, 16, 16).astype(np.float32)
        return self.join(numbers.reshape(*leading, 256))


Q6_K = Q6_KFormat(
    name="Q6_K",
    block_elements=256,
    block_bytes=210,
    codes=ByteRange(offset=0, bytes=192),
    scales=ByteRange(offset=192, bytes=18),
)
