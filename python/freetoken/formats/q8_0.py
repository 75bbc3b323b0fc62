"""Q8_0: 32 numbers as a binary16 scale d and int8 codes q; a number is q * d."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import ByteRange, Bytes, Float32, WeightFormat


class Q8_0Format(WeightFormat):
    """34 bytes a block: d, then q[0..31]."""

    def dequantize(self, rows: Bytes) -> Float32:
        blocks = self.blocks(rows)
        scale = blocks[..., :2].copy().view("<f2").astype(np.float32)
        codes = blocks[..., 2:].view(np.int8).astype(np.float32)
        with np.errstate(invalid="ignore"):
            numbers = codes * scale
        return self.join(numbers)


Q8_0 = Q8_0Format(
    name="Q8_0",
    block_elements=32,
    block_bytes=34,
    codes=ByteRange(offset=2, bytes=32),
    scales=ByteRange(offset=0, bytes=2),
)
