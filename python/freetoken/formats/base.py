"""The contract of a weight format: data about its blocks, and a reference dequantisation.

A new format is one new file with one subclass of `WeightFormat` and one instance of it, and its
line in the table of `freetoken.formats`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from freetoken.errors import CheckpointError

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ByteRange:
    """Where one field lies inside a block: `bytes` bytes from `offset`."""

    offset: int
    bytes: int


@dataclass(frozen=True)
class WeightFormat(ABC):
    """How a matrix row of `cols` numbers is laid out in bytes.

    A row is a run of blocks of `block_elements` numbers in `block_bytes` bytes. Each block is a
    field of codes and a field of scales (empty for plain floats); a packed store keeps the two in
    planes of their own, the checkpoint keeps them interleaved.
    """

    name: str
    block_elements: int
    block_bytes: int
    codes: ByteRange
    scales: ByteRange

    def row_bytes(self, cols: int) -> int:
        """Bytes of one row of `cols` numbers. Raises CheckpointError if blocks do not fit."""
        if cols % self.block_elements:
            raise CheckpointError(
                f"a row of {cols} numbers is no whole number of {self.name} blocks",
                found=f"{cols} columns",
                expected=f"a multiple of {self.block_elements}",
                hint="the file is damaged, or was written with another block size",
            )
        return cols // self.block_elements * self.block_bytes

    def blocks(self, rows: Bytes) -> Bytes:
        """Rows cut into blocks, contiguous: uint8 [..., row_bytes] -> [..., B, block_bytes].

        Raises CheckpointError if the last dimension is no whole number of blocks.
        """
        row_bytes = rows.shape[-1]
        if row_bytes % self.block_bytes:
            raise CheckpointError(
                f"a row of {row_bytes} bytes is no whole number of {self.name} blocks",
                found=f"{row_bytes} bytes",
                expected=f"a multiple of {self.block_bytes}",
                hint="the file is damaged, or was written with another block size",
            )
        count = row_bytes // self.block_bytes
        return np.ascontiguousarray(rows).reshape(*rows.shape[:-1], count, self.block_bytes)

    def join(self, numbers: Float32) -> Float32:
        """Numbers of blocks as rows: [..., B, block_elements] -> [..., B * block_elements]."""
        *leading, count, elements = numbers.shape
        return numbers.reshape(*leading, count * elements)

    @abstractmethod
    def dequantize(self, rows: Bytes) -> Float32:
        """Numbers of packed rows: uint8 [..., row_bytes] -> float32 [..., cols]. The reference."""
