"""NVFP4: 16 numbers as e2m1 codes with one e4m3 scale, and a factor for the whole tensor.

GGUF keeps four scales before the codes of 64 numbers (`NVFP4`); ModelOpt and compressed-tensors
keep the scales in a tensor of their own and the codes in pairs (`NVFP4_PAIRS`).
"""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import ByteRange, Bytes, Float32, PlanarFormat, WeightFormat
from freetoken.formats.nibbles import E2M1_DOUBLED, pair_numbers, unpack_nibbles
from freetoken.formats.scales import E4M3, decode_e4m3

# GGUF's scales are unsigned: it looks at neither the sign bit nor 0xFF, and takes 0x7F as zero.
_UNSIGNED_E4M3 = np.concatenate([E4M3[:128], E4M3[:128]])
_UNSIGNED_E4M3[[0x7F, 0xFF]] = [0, 480]


class NVFP4Format(WeightFormat):
    """36 bytes a block: four e4m3 scales, then for each of them 8 bytes of codes in halves."""

    def dequantize(self, rows: Bytes) -> Float32:
        blocks = self.blocks(rows)
        leading = blocks.shape[:-1]
        codes = unpack_nibbles(blocks[..., 4:].reshape(*leading, 4, 8))
        numbers = E2M1_DOUBLED[codes].astype(np.float32) * np.float32(0.5)
        numbers *= _UNSIGNED_E4M3[blocks[..., :4]][..., None]
        return self.join(numbers.reshape(*leading, 64))


class NVFP4PairsFormat(PlanarFormat):
    """Codes in pairs (see `unpack_pairs`), and e4m3 scales in a tensor of their own."""

    def dequantize(self, rows: Bytes) -> Float32:
        return self.join(pair_numbers(self.blocks(rows)))

    def decode_scales(self, scales: Bytes) -> Float32:
        return decode_e4m3(scales)


NVFP4 = NVFP4Format(
    name="NVFP4",
    block_elements=64,
    block_bytes=36,
    codes=ByteRange(offset=4, bytes=32),
    scales=ByteRange(offset=0, bytes=4),
)
NVFP4_PAIRS = NVFP4PairsFormat(
    name="NVFP4_PAIRS",
    block_elements=16,
    block_bytes=8,
    codes=ByteRange(offset=0, bytes=8),
    scales=ByteRange(offset=0, bytes=1),
    scale_block=(1, 16),
)
