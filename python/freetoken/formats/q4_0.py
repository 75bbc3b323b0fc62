"""Q4_0: 32 numbers as a binary16 scale d and 4-bit codes q; a number is (q - 8) * d."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import ByteRange, Bytes, Float32, WeightFormat
from freetoken.formats.nibbles import unpack_nibbles


class Q4_0Format(WeightFormat):
    """18 bytes a block: d, then 16 bytes of codes in halves (see `unpack_nibbles`)."""

    def dequantize(self, rows: Bytes) -> Float32:
        blocks = self.blocks(rows)
        scale = blocks[..., :2].copy().view("<f2").astype(np.float32)
        codes = unpack_nibbles(blocks[..., 2:]).astype(np.float32) - np.float32(8)
        with np.errstate(invalid="ignore"):
            numbers = scale * codes
        return self.join(numbers)


Q4_0 = Q4_0Format(
    name="Q4_0",
    block_elements=32,
    block_bytes=18,
    codes=ByteRange(offset=2, bytes=16),
    scales=ByteRange(offset=0, bytes=2),
)
