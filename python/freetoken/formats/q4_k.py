"""Q4_K: 256 numbers in 8 sub-blocks of 32 with 4-bit codes: q * (d * scale) - dmin * minimum."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import ByteRange, Bytes, Float32, WeightFormat
from freetoken.formats.k_scales import scaled


def low_nibbles(packed: Bytes) -> Bytes:
    """uint8 [..., 128] -> [..., 8, 32]: 32 bytes hold one sub-block in their low and the next one
    in their high nibbles."""
    pairs = packed.reshape(*packed.shape[:-1], 4, 32)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-2)
    return codes.reshape(*packed.shape[:-1], 8, 32)


class Q4_KFormat(WeightFormat):
    """144 bytes a block: scales (see `unpack_scales`), 128 bytes of nibbles."""

    def dequantize(self, rows: Bytes) -> Float32:
        blocks = self.blocks(rows)
        return self.join(scaled(low_nibbles(blocks[..., 16:]), blocks[..., :16]))


Q4_K = Q4_KFormat(
    name="Q4_K",
    block_elements=256,
    block_bytes=144,
    codes=ByteRange(offset=16, bytes=128),
    scales=ByteRange(offset=0, bytes=16),
)
