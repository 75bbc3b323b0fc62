"""From blocks, which hold codes and scales side by side, to a plane of each."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import ByteRange, Bytes


def copy_field(blocks: Bytes, block_bytes: int, field: ByteRange, target: Bytes) -> None:
    """Gather one field of every block into a plane, uint8 [blocks * field.bytes].

    `blocks` is uint8, of any shape whose last dimension is whole blocks and contiguous.
    """
    if field.bytes == block_bytes:
        target.reshape(blocks.shape)[...] = blocks
        return
    block_type = np.dtype(
        {
            "names": ["field"],
            "formats": [f"V{field.bytes}"],
            "offsets": [field.offset],
            "itemsize": block_bytes,
        }
    )
    # items of a void type copy fastest
    fields = blocks.view(block_type)["field"]
    target.view(f"V{field.bytes}").reshape(fields.shape)[...] = fields
