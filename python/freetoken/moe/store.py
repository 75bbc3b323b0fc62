"""Where expert weights lie: the checkpoint's own bytes, packed records, and a pool of slots.

One expert of a packed store is one contiguous record, and a layer's records are a tensor uint8
[n, record_bytes], in host memory or on a device. Its planes (codes, scales and, where there
are such, factor and bias of gate, up and down) stand at fixed offsets that are multiples of 256
bytes, and so does every record; a slot has the same layout, so that a fetch is one copy of one
record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.errors import CheckpointError
from freetoken.formats.base import ByteRange, WeightFormat
from freetoken.formats.planes import copy_field
from freetoken.kernels.activations import Activation
from freetoken.kernels.base import ExpertBank, ExpertMath, ExpertPart
from freetoken.platforms.base import SlotMemory
from freetoken.platforms.host_memory import ALIGNMENT_BYTES

Bytes = npt.NDArray[np.uint8]

FACTOR_BYTES = 4


@dataclass(frozen=True)
class ExpertTensor:
    """One part ("gate", "up" or "down") of every expert of a layer, as it lies on disk.

    `experts` has for each expert a uint8 view of rows * format.row_bytes(cols) bytes: contiguous,
    or [rows, row bytes] with contiguous rows at any stride. Of a format with a `scale_block`,
    `scales` has the same of the planes of scales; else it is empty. `factors` float32 [E]
    multiplies each expert's weights (None: one); `biases` float32 [E, rows] is added to each
    expert's product (None: nothing).
    """

    name: str
    format: WeightFormat
    rows: int
    cols: int
    experts: tuple[Bytes, ...]
    scales: tuple[Bytes, ...] = ()
    factors: npt.NDArray[np.float32] | None = None
    biases: npt.NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        size = (self.rows, self.format.row_bytes(self.cols))
        for expert, data in enumerate(self.experts):
            self._check(f"weights of expert {expert}", data, *size)
        size = self.format.scale_plane(self.rows, self.cols)
        for expert, data in enumerate(self.scales):
            self._check(f"scales of expert {expert}", data, *size)
        apart = len(self.experts) if self.format.scale_block else 0
        counts = len(self.scales), len(self.experts if self.factors is None else self.factors)
        if counts != (apart, len(self.experts)):
            raise CheckpointError(
                f"the {self.name} weights of {len(self.experts)} experts lack scales or factors",
                found=f"scales of {counts[0]} experts, factors of {counts[1]}",
                expected=f"{apart} and {len(self.experts)} for {self.format.name}",
                hint="the checkpoint does not match its own config; download it again",
            )

        if self.biases is not None and (
            self.biases.shape != (len(self.experts), self.rows)
            or self.biases.dtype != np.float32
            or not self.biases.flags.c_contiguous
        ):
            raise CheckpointError(
                f"the {self.name} biases do not fit the experts",
                found=f"{self.biases.dtype} {list(self.biases.shape)}",
                expected=f"contiguous float32 {[len(self.experts), self.rows]}",
                hint="the checkpoint does not match its own config; download it again",
            )

    def _check(self, what: str, data: Bytes, rows: int, row_bytes: int) -> None:
        strided = data.shape == (rows, row_bytes) and (row_bytes == 1 or data.strides[1:] == (1,))
        whole = data.nbytes == rows * row_bytes and data.flags.c_contiguous
        if data.dtype != np.uint8 or not (strided or whole):
            raise CheckpointError(
                f"the {self.name} {what} have the wrong size",
                found=f"{data.nbytes} bytes of {data.dtype}",
                expected=f"{rows * row_bytes} contiguous bytes: {self.rows} rows of {self.cols} "
                f"{self.format.name} numbers",
                hint="the checkpoint does not match its own config; download it again",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all experts on disk."""
        return sum(data.nbytes for data in (*self.experts, *self.scales))


@dataclass(frozen=True)
class LayerExperts:
    """All experts of one MoE layer: gate and up [I, H], down [H, I].

    `layer_id` numbers the MoE layers alone, from 0 without gaps.
    """

    layer_id: int
    gate: ExpertTensor
    up: ExpertTensor
    down: ExpertTensor
    activation: Activation

    def __post_init__(self) -> None:
        shapes = [(part.rows, part.cols, len(part.experts)) for part in self.parts]
        rows, cols, experts = shapes[0]
        if experts == 0 or shapes != [shapes[0], shapes[0], (cols, rows, experts)]:
            raise CheckpointError(
                f"the experts of MoE layer {self.layer_id} do not fit together",
                found=", ".join(
                    f"{part.name} {count} x [{r}, {c}]"
                    for part, (r, c, count) in zip(self.parts, shapes, strict=True)
                ),
                expected="gate and up E x [I, H] and down E x [H, I], with at least one expert",
                hint="the checkpoint does not match its own config; download it again",
            )

    @property
    def parts(self) -> tuple[ExpertTensor, ExpertTensor, ExpertTensor]:
        return self.gate, self.up, self.down

    @property
    def experts(self) -> int:
        return len(self.gate.experts)


class ExpertStore(Protocol):
    """All experts of the model on the host."""

    def bank(self, layer_id: int) -> ExpertBank:
        """The experts of a layer, for a kernel to bind."""
        ...


class MappedExpertStore:
    """The checkpoint's own bytes, not copied."""

    def __init__(self, layers: Sequence[LayerExperts]) -> None:
        _check_numbering(layers)
        self._banks = tuple(_mapped_bank(layer) for layer in layers)

    def bank(self, layer_id: int) -> ExpertBank:
        return self._banks[layer_id]


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


class PackedExpertStore:
    """All experts as records in host memory. Keeps nothing of the checkpoint.

    `plain_layers` are those that a device was to read and cannot: their records are in memory that
    could not be pinned. Copies of them go by way of the driver's own pinned memory, while the host
    waits, so no graph can hold them.
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        memory: SlotMemory,
        *,
        pinned: bool = False,
        pinnable_bytes: int | None = None,
    ) -> None:
        """With `pinned` the records can be read by the device: they are filled first and pinned
        afterwards, layer by layer, up to `pinnable_bytes` (None: all) and for as long as the
        system grants it. Raises CapacityError if memory is short."""
        _check_numbering(layers)
        self.layouts = tuple(RecordLayout.of(layer) for layer in layers)
        self._records = tuple(
            _host_records(memory, layout, layer.experts)
            for layout, layer in zip(self.layouts, layers, strict=True)
        )
        for layer, layout, records in zip(layers, self.layouts, self._records, strict=True):
            rows = records.numpy()
            for expert in range(layer.experts):
                layout.pack(layer, expert, rows[expert])
        first = self._pin(memory, pinnable_bytes) if pinned else self.layers
        self.plain_layers = frozenset(range(first, self.layers))

    def _pin(self, memory: SlotMemory, pinnable_bytes: int | None) -> int:
        """How many layers, from the first on, were pinned."""
        left_bytes = pinnable_bytes
        for layer_id, records in enumerate(self._records):
            if left_bytes is not None:
                left_bytes -= records.nbytes
                if left_bytes < 0:
                    return layer_id
            if not memory.pin(records.view(-1)):
                return layer_id
        return self.layers

    @property
    def layers(self) -> int:
        return len(self._records)

    def bank(self, layer_id: int) -> ExpertBank:
        return self.layouts[layer_id].bank(self._records[layer_id])

    def records(self, layer_id: int) -> Tensor:
        """The records of a layer, uint8 [E, record_bytes]. Not to be written."""
        return self._records[layer_id]


class SlotPool:
    """`slots` records per layer in the device's memory, zero until filled."""

    def __init__(self, memory: SlotMemory, layers: Sequence[LayerExperts], slots: int) -> None:
        _check_numbering(layers)
        self.slots = slots
        self.layouts = tuple(RecordLayout.of(layer) for layer in layers)
        self._records = tuple(_slots(memory, layout, slots) for layout in self.layouts)

    def bank(self, layer_id: int) -> ExpertBank:
        """The slots of a layer, as a bank: slot s is its expert s."""
        return self.layouts[layer_id].bank(self._records[layer_id])

    def fill(self, layer_id: int, slot: int, record: Tensor) -> None:
        """Copy a record, uint8 [record_bytes], into a slot."""
        self._records[layer_id][slot].copy_(record)

    def clear(self, layer_id: int, slot: int) -> None:
        """Make a slot zero again, as one that was never filled."""
        self._records[layer_id][slot].zero_()

    def record(self, layer_id: int, slot: int) -> Tensor:
        """The bytes of a slot, uint8 [record_bytes]. Not to be written."""
        return self._records[layer_id][slot]

    def records(self, layer_id: int) -> Tensor:
        """All slots of a layer, uint8 [S, record_bytes]."""
        return self._records[layer_id]

    def pack(self, layer: LayerExperts) -> None:
        """Fill slot e with expert e, straight from the checkpoint. Needs slots >= E."""
        layout = self.layouts[layer.layer_id]
        records = self._records[layer.layer_id]
        if records.device.type == "cpu":
            rows = records.numpy()
            for expert in range(layer.experts):
                layout.pack(layer, expert, rows[expert])
            return
        staging = torch.zeros(layout.record_bytes, dtype=torch.uint8)
        for expert in range(layer.experts):
            layout.pack(layer, expert, staging.numpy())
            records[expert].copy_(staging)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _host_records(memory: SlotMemory, layout: RecordLayout, count: int) -> Tensor:
    rows = memory.allocate(count * layout.record_bytes).reshape(count, -1)
    records = torch.from_numpy(rows)
    memory.place(layout.bank(records), mapped=False)
    return records


def _slots(memory: SlotMemory, layout: RecordLayout, count: int) -> Tensor:
    slots = memory.allocate_slots(count * layout.record_bytes).view(count, -1)
    if slots.device.type == "cpu":
        memory.place(layout.bank(slots), mapped=False)
    return slots


def _plane(record: Bytes, plane: ByteRange) -> Bytes:
    return record[plane.offset : plane.offset + plane.bytes]


def _mapped_bank(layer: LayerExperts) -> ExpertBank:
    gate, up, down = (_mapped_part(part) for part in layer.parts)
    owners = tuple(
        data
        for part in layer.parts
        for data in (*part.experts, *part.scales, part.factors, part.biases)
        if data is not None
    )
    return ExpertBank(gate, up, down, layer.activation, owners)


def _mapped_part(part: ExpertTensor) -> ExpertPart:
    fmt = part.format
    codes = _addresses(part.experts)
    row_stride = _row_stride(part.experts, fmt.row_bytes(part.cols))
    scales, scale_row_stride, scale_block_stride = codes, row_stride, fmt.block_bytes
    if fmt.scale_block is not None:
        scales, scale_block_stride = _addresses(part.scales), fmt.scales.bytes
        scale_row_stride = _row_stride(part.scales, fmt.scale_plane(part.rows, part.cols)[1])
    return ExpertPart(
        format=fmt,
        rows=part.rows,
        cols=part.cols,
        codes=codes + np.uint64(fmt.codes.offset),
        scales=scales + np.uint64(fmt.scales.offset),
        code_row_stride_bytes=row_stride,
        code_block_stride_bytes=fmt.block_bytes,
        scale_row_stride_bytes=scale_row_stride,
        scale_block_stride_bytes=scale_block_stride,
        factors=None if part.factors is None else _items(part.factors),
        biases=None if part.biases is None else _items(part.biases),
    )


def _addresses(views: Sequence[Bytes]) -> npt.NDArray[np.uint64]:
    return np.array([data.ctypes.data for data in views], dtype=np.uint64)


def _items(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint64]:
    """Where array[0], array[1], ... begin."""
    steps = np.arange(len(array), dtype=np.uint64) * np.uint64(array.strides[0])
    addresses: npt.NDArray[np.uint64] = np.uint64(array.ctypes.data) + steps
    return addresses


def _row_stride(views: Sequence[Bytes], row_bytes: int) -> int:
    """Bytes from row to row: of all experts the same, for their views are cut alike."""
    return views[0].strides[0] if views[0].ndim == 2 else row_bytes


def _check_numbering(layers: Sequence[LayerExperts]) -> None:
    found = [layer.layer_id for layer in layers]
    if found != list(range(len(layers))):
        raise ValueError(f"MoE layers are numbered {found}; expected 0, 1, ... without gaps")
