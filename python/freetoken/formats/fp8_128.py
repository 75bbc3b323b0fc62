"""FP8_128: e4m3 numbers, with one float32 scale for each 128 rows and 128 columns.

The blocks at the last rows and columns may be smaller: 576 rows have 5 rows of scales.
"""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import ByteRange, Bytes, Float32, PlanarFormat
from freetoken.formats.scales import decode_e4m3


class FP8BlockFormat(PlanarFormat):
    """Plain e4m3 numbers, and float32 scales in a tensor of their own."""

    def dequantize(self, rows: Bytes) -> Float32:
        return decode_e4m3(self.blocks(rows)[..., 0])

    def decode_scales(self, scales: Bytes) -> Float32:
        return np.ascontiguousarray(scales).view("<f4").astype(np.float32)


FP8_128 = FP8BlockFormat(
    name="FP8_128",
    block_elements=1,
    block_bytes=1,
    codes=ByteRange(offset=0, bytes=1),
    scales=ByteRange(offset=0, bytes=4),
    scale_block=(128, 128),
)
