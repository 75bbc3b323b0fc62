"""Packed experts: one expert is one contiguous record.

A layer's records are a tensor uint8 [n, record_bytes], in host memory or on a device. The planes of
a record (codes, scales and, where there are such, factor and bias of gate, up and down) stand at
fixed offsets that are multiples of 256 bytes, and so does every record; a slot has the same layout,
so that a fetch is one copy of one record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from freetoken.formats.base import ByteRange, Bytes, WeightFormat
from freetoken.formats.planes import copy_field
from freetoken.kernels.activations import Activation
from freetoken.kernels.base import ExpertBank, ExpertMath, ExpertPart
from freetoken.moe.expert_tensors import ExpertTensor, LayerExperts
from freetoken.platforms.host_memory import ALIGNMENT_BYTES

FACTOR_BYTES = 4


@dataclass(frozen=True)
class PartLayout:
    """One part inside a record: its planes. `scales` is empty for plain floats, `factor` (four
    bytes, float32) where all factors are one, `bias` (float32 [rows]) where there is none."""

    name: str
    format: WeightFormat
    rows: int
    cols: int
    codes: ByteRange
    scales: ByteRange
    factor: ByteRange
    bias: ByteRange

    @staticmethod
    def of(part: ExpertTensor, offset: int) -> PartLayout:
        """The planes of a part from `offset` on."""
        fmt = part.format
        code_bytes = part.rows * fmt.code_row_bytes(part.cols)
        scale_rows, scale_row_bytes = fmt.scale_plane(part.rows, part.cols)
        codes = ByteRange(offset, code_bytes)
        scales = ByteRange(_aligned(offset + code_bytes), scale_rows * scale_row_bytes)
        factor = ByteRange(
            _aligned(scales.offset + scales.bytes), 0 if part.factors is None else FACTOR_BYTES
        )
        bias = ByteRange(
            _aligned(factor.offset + factor.bytes), 0 if part.biases is None else 4 * part.rows
        )
        return PartLayout(part.name, fmt, part.rows, part.cols, codes, scales, factor, bias)

    @property
    def end(self) -> int:
        return _aligned(self.bias.offset + self.bias.bytes)

    def expert_part(self, starts: npt.NDArray[np.uint64]) -> ExpertPart:
        """The part of records at those addresses, uint64 [n]."""
        fmt = self.format
        return ExpertPart(
            format=fmt,
            rows=self.rows,
            cols=self.cols,
            codes=starts + np.uint64(self.codes.offset),
            scales=starts + np.uint64(self.scales.offset),
            code_row_stride_bytes=fmt.code_row_bytes(self.cols),
            code_block_stride_bytes=fmt.codes.bytes,
            scale_row_stride_bytes=fmt.scale_plane(self.rows, self.cols)[1],
            scale_block_stride_bytes=fmt.scales.bytes,
            factors=starts + np.uint64(self.factor.offset) if self.factor.bytes else None,
            biases=starts + np.uint64(self.bias.offset) if self.bias.bytes else None,
        )

    def pack(self, part: ExpertTensor, expert: int, record: Bytes) -> None:
        """Write one expert's planes into its record, uint8 [record_bytes]."""
        fmt = self.format
        blocks = part.experts[expert]
        copy_field(blocks, fmt.block_bytes, fmt.codes, _plane(record, self.codes))
        if fmt.scale_block is not None:
            _plane(record, self.scales)[...] = part.scales[expert].reshape(-1)
        elif self.scales.bytes:
            copy_field(blocks, fmt.block_bytes, fmt.scales, _plane(record, self.scales))
        if part.factors is not None:
            _plane(record, self.factor).view(np.float32)[0] = part.factors[expert]
        if part.biases is not None:
            _plane(record, self.bias).view(np.float32)[...] = part.biases[expert]


@dataclass(frozen=True)
class RecordLayout:
    """One expert of a layer as one record of `record_bytes` bytes."""

    parts: tuple[PartLayout, ...]
    record_bytes: int
    activation: Activation

    @staticmethod
    def of(layer: LayerExperts) -> RecordLayout:
        """The layout that a layer's formats and shapes give."""
        offset = 0
        parts = []
        for part in layer.parts:
            parts.append(PartLayout.of(part, offset))
            offset = parts[-1].end
        return RecordLayout(tuple(parts), offset, layer.activation)

    def bank(self, records: Tensor) -> ExpertBank:
        """The bank of records uint8 [n, record_bytes]; its addresses are those of their device."""
        starts = np.arange(len(records), dtype=np.uint64) * np.uint64(self.record_bytes)
        starts += np.uint64(records.data_ptr())
        gate, up, down = (part.expert_part(starts) for part in self.parts)
        return ExpertBank(gate, up, down, self.activation, owners=(records,))

    def pack(self, layer: LayerExperts, expert: int, record: Bytes) -> None:
        """Write one expert's planes into its record, uint8 [record_bytes]."""
        for part, tensor in zip(self.parts, layer.parts, strict=True):
            part.pack(tensor, expert, record)


# Makes the kernel of records uint8 [n, record_bytes] in that layout.
BindRecords = Callable[[RecordLayout, Tensor], ExpertMath]


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _plane(record: Bytes, plane: ByteRange) -> Bytes:
    return record[plane.offset : plane.offset + plane.bytes]
