"""Records on a device, as GPU kernels are told of them."""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels.triton.expert_bank import NONE, DeviceBank, DevicePart
from freetoken.moe.store import PartLayout, RecordLayout


def device_bank(layout: RecordLayout, records: Tensor) -> DeviceBank:
    """The bank of records uint8 [n, record_bytes]: slots of a pool, or a buffer."""
    gate, up, down = (_device_part(part) for part in layout.parts)
    return DeviceBank(records, gate, up, down, layout.activation)


def _device_part(part: PartLayout) -> DevicePart:
    return DevicePart(
        part.format,
        part.rows,
        part.cols,
        codes=part.codes.offset,
        scales=part.scales.offset,
        factor=part.factor.offset if part.factor.bytes else NONE,
        bias=part.bias.offset if part.bias.bytes else NONE,
    )
