"""Order of 4-bit codes within a block."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import Bytes


def unpack_nibbles(packed: Bytes) -> Bytes:
    """Codes stored in halves: uint8 [..., n] -> uint8 [..., 2n] with values 0..15.

    Byte j holds element j in its low and element j + n in its high nibble.
    """
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)
