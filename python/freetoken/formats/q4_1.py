"""Q4_1: 32 numbers as a binary16 scale d, a minimum m and 4-bit codes q: q * d + m."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import ByteRange, Bytes, Float32, WeightFormat
from freetoken.formats.nibbles import unpack_nibbles


class Q4_1Format(WeightFormat):
    """20 bytes a block: d, m, then 16 bytes of codes in halves (see `unpack_nibbles`)."""

    def dequantize(self, rows: Bytes) -> Float32:
        blocks = self.blocks(rows)
        scale = blocks[..., :2].copy().view("<f2").astype(np.float32)
        minimum = blocks[..., 2:4].copy().view("<f2").astype(np.float32)
        codes = unpack_nibbles(blocks[..., 4:]).astype(np.float32)
        with np.errstate(invalid="ignore"):
            numbers = scale * codes + minimum
        return self.join(numbers)


Q4_1 = Q4_1Format(
    name="Q4_1",
    block_elements=32,
    block_bytes=20,
    codes=ByteRange(offset=4, bytes=16),
    scales=ByteRange(offset=0, bytes=4),
)
