"""MXFP4: 32 numbers as e2m1 codes with one power of two (e8m0).

GGUF keeps the scale before the codes and the codes in halves (`MXFP4`); gpt-oss keeps scales in a
tensor of their own and the codes in pairs (`MXFP4_PAIRS`), and so does DeepSeek (`DS_FP4`), whose
experts read activations that have been rounded to FP8.
"""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import ByteRange, Bytes, Float32, PlanarFormat, WeightFormat
from freetoken.formats.nibbles import E2M1_DOUBLED, pair_numbers, unpack_nibbles
from freetoken.formats.scales import decode_e8m0


class MXFP4Format(WeightFormat):
    """17 bytes a block: e8m0, then 16 bytes of codes in halves (see `unpack_nibbles`)."""

    def dequantize(self, rows: Bytes) -> Float32:
        blocks = self.blocks(rows)
        numbers = E2M1_DOUBLED[unpack_nibbles(blocks[..., 1:])].astype(np.float32)
        numbers *= np.float32(0.5)
        with np.errstate(over="ignore"):
            return self.join(numbers * decode_e8m0(blocks[..., :1]))


class MXFP4PairsFormat(PlanarFormat):
    """Codes in pairs (see `unpack_pairs`), and e8m0 scales in a tensor of their own."""

    def dequantize(self, rows: Bytes) -> Float32:
        return self.join(pair_numbers(self.blocks(rows)))

    def decode_scales(self, scales: Bytes) -> Float32:
        return decode_e8m0(scales)


MXFP4 = MXFP4Format(
    name="MXFP4",
    block_elements=32,
    block_bytes=17,
    codes=ByteRange(offset=1, bytes=16),
    scales=ByteRange(offset=0, bytes=1),
)
MXFP4_PAIRS = MXFP4PairsFormat(
    name="MXFP4_PAIRS",
    block_elements=32,
    block_bytes=16,
    codes=ByteRange(offset=0, bytes=16),
    scales=ByteRange(offset=0, bytes=1),
    scale_block=(1, 32),
)
DS_FP4 = MXFP4PairsFormat(
    name="DS_FP4",
    block_elements=32,
    block_bytes=16,
    codes=ByteRange(offset=0, bytes=16),
    scales=ByteRange(offset=0, bytes=1),
    scale_block=(1, 32),
)
