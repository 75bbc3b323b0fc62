"""bfloat16, little endian: the upper half of a binary32."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import ByteRange, Bytes, Float32, WeightFormat


class BF16Format(WeightFormat):
    """Plain numbers: a block of one, without scale."""

    def dequantize(self, rows: Bytes) -> Float32:
        upper = self.blocks(rows).view("<u2")[..., 0]
        return (upper.astype(np.uint32) << 16).view(np.float32)


BF16 = BF16Format(
    name="BF16",
    block_elements=1,
    block_bytes=2,
    codes=ByteRange(offset=0, bytes=2),
    scales=ByteRange(offset=0, bytes=0),
)
