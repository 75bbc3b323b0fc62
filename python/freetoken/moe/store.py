"""Where expert weights lie: the checkpoint's own bytes, packed records, and a pool of slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.formats.base import Bytes
from freetoken.kernels.base import ExpertBank, ExpertPart
from freetoken.moe.expert_tensors import ExpertTensor, LayerExperts
from freetoken.moe.layouts import BindRecords, PartLayout, RecordLayout
from freetoken.platforms.base import SlotMemory

__all__ = [
    "BindRecords",
    "Bytes",
    "ExpertStore",
    "ExpertTensor",
    "LayerExperts",
    "MappedExpertStore",
    "PackedExpertStore",
    "PartLayout",
    "RecordLayout",
    "SlotPool",
]


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
