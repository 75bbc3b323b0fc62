"""4-bit codes: their order within a block, and what they mean as e2m1."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import Bytes, Float32

# e2m1: a sign, two bits of exponent, one of mantissa.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
# The same as GGUF has it: a table of integers, twice the value, without a negative zero.
E2M1_DOUBLED = (2 * E2M1).astype(np.int8)


def unpack_nibbles(packed: Bytes) -> Bytes:
    """Codes stored in halves: uint8 [..., n] -> uint8 [..., 2n] with values 0..15.

    Byte j holds element j in its low and element j + n in its high nibble.
    """
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def unpack_pairs(packed: Bytes) -> Bytes:
    """Codes stored in pairs: uint8 [..., n] -> uint8 [..., 2n] with values 0..15.

    Byte j holds element 2j in its low and element 2j + 1 in its high nibble.
    """
    pairs = np.stack([packed & 0x0F, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pair_numbers(rows: Bytes) -> Float32:
    """e2m1 numbers of codes in pairs: uint8 [..., n] -> float32 [..., 2n]."""
    numbers: Float32 = E2M1[unpack_pairs(rows)]
    return numbers
