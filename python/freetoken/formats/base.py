"""The contract of a weight format: data about its blocks, and a reference dequantisation.

A new format is one new file with one subclass of `WeightFormat` (`PlanarFormat` if its scales lie
in a tensor of their own) and one instance of it, and its line in the table of `freetoken.formats`.
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

    Some formats have two planes in the checkpoint too. Their `scale_block` says how many rows and
    columns share one item of `scales.bytes` bytes in the tensor of scales; `block_bytes` and
    `codes` then describe the tensor of codes alone.
    """

    name: str
    block_elements: int
    block_bytes: int
    codes: ByteRange
    scales: ByteRange
    scale_block: tuple[int, int] | None = None

    def code_row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` numbers in the plane of codes."""
        return cols // self.block_elements * self.codes.bytes

    def scale_plane(self, rows: int, cols: int) -> tuple[int, int]:
        """Rows, and bytes of a row, of the plane of scales that a matrix [rows, cols] has."""
        block_rows, block_cols = self.scale_block or (1, self.block_elements)
        return -(-rows // block_rows), -(-cols // block_cols) * self.scales.bytes

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
        """Numbers of packed rows: uint8 [..., row_bytes] -> float32 [..., cols]. The reference.

        Of a format whose scales lie apart: the numbers that the codes mean with a scale of one.
        """

    def dequantize_planes(
        self, codes: Bytes, scales: Bytes, factor: Float32 | float = 1.0
    ) -> Float32:
        """Numbers of matrices in two planes, times `factor` (one number, or one per matrix).

        uint8 [..., rows, blocks * codes.bytes] and [..., *scale_plane(rows, cols)] -> float32
        [..., rows, cols].
        """
        *leading, code_bytes = codes.shape
        count = code_bytes // self.codes.bytes
        blocks = np.zeros((*leading, count, self.block_bytes), np.uint8)
        for field, plane in ((self.codes, codes), (self.scales, scales)):
            fields = plane.reshape(*leading, count, field.bytes)
            blocks[..., field.offset : field.offset + field.bytes] = fields
        return times_factor(self.dequantize(blocks.reshape(*leading, -1)), factor)


class PlanarFormat(WeightFormat):
    """A format whose scales lie in a tensor of their own."""

    @abstractmethod
    def decode_scales(self, scales: Bytes) -> Float32:
        """uint8 [..., n * scales.bytes] -> float32 [..., n]."""

    def dequantize_planes(
        self, codes: Bytes, scales: Bytes, factor: Float32 | float = 1.0
    ) -> Float32:
        numbers = self.dequantize(codes)
        block_rows, block_cols = self.scale_block or (1, self.block_elements)
        rows, cols = numbers.shape[-2:]
        decoded = self.decode_scales(scales)
        decoded = decoded.repeat(block_rows, axis=-2)[..., :rows, :]
        decoded = decoded.repeat(block_cols, axis=-1)[..., :cols]
        with np.errstate(invalid="ignore", over="ignore"):
            return times_factor(numbers * decoded, factor)


def times_factor(numbers: Float32, factor: Float32 | float) -> Float32:
    """Numbers [..., rows, cols] times a factor of shape [] or [...]."""
    factors = np.asarray(factor, np.float32)
    if (factors == 1).all():
        return numbers
    with np.errstate(invalid="ignore", over="ignore"):
        return numbers * factors[..., None, None]
