"""Q5_K: as Q4_K with a fifth bit: 256 numbers in 8 sub-blocks of 32."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import ByteRange, Bytes, Float32, WeightFormat
from freetoken.formats.k_scales import scaled
from freetoken.formats.q4_k import low_nibbles

_SUB_BLOCKS = np.arange(8, dtype=np.uint8)[:, None]


class Q5_KFormat(WeightFormat):
    """176 bytes a block: scales (see `unpack_scales`), 32 bytes whose bit i is the fifth bit of
    sub-block i, 128 bytes of nibbles as in Q4_K."""

    def dequantize(self, rows: Bytes) -> Float32:
        blocks = self.blocks(rows)
        fifth = ((blocks[..., None, 16:48] >> _SUB_BLOCKS) & 1).astype(np.uint8)
        codes: Bytes = low_nibbles(blocks[..., 48:]) | (fifth << np.uint8(4))
        return self.join(scaled(codes, blocks[..., :16]))


Q5_K = Q5_KFormat(
    name="Q5_K",
    block_elements=256,
    block_bytes=176,
    codes=ByteRange(offset=16, bytes=160),
    scales=ByteRange(offset=0, bytes=16),
)
