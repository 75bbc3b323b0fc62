"""IEEE binary16, little endian."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import ByteRange, Bytes, Float32, WeightFormat


class F16Format(WeightFormat):
    """Plain numbers: a block of one, without scale."""

    def dequantize(self, rows: Bytes) -> Float32:
        numbers = self.blocks(rows).view("<f2")[..., 0]
        return numbers.astype(np.float32)


F16 = F16Format(
    name="F16",
    block_elements=1,
    block_bytes=2,
    codes=ByteRange(offset=0, bytes=2),
    scales=ByteRange(offset=0, bytes=0),
)
