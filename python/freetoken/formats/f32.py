"""IEEE binary32, little endian."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import ByteRange, Bytes, Float32, WeightFormat


class F32Format(WeightFormat):
    """Plain numbers: a block of one, without scale."""

    def dequantize(self, rows: Bytes) -> Float32:
        numbers = self.blocks(rows).view("<f4")[..., 0]
        return numbers.astype(np.float32)


F32 = F32Format(
    name="F32",
    block_elements=1,
    block_bytes=4,
    codes=ByteRange(offset=0, bytes=4),
    scales=ByteRange(offset=0, bytes=0),
)
