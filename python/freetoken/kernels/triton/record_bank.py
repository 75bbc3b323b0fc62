"""From a bank's addresses to the tensor that they point into."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.errors import ConfigError
from freetoken.kernels.base import ExpertBank, ExpertPart
from freetoken.kernels.triton.expert_bank import NONE, DeviceBank, DevicePart


def device_bank(bank: ExpertBank, device: torch.device) -> DeviceBank:
    """A bank of packed records. Its owner is their tensor, uint8 [n, record_bytes] on the device,
    and its addresses are the device's. Raises ConfigError for any other, e.g. a mapped checkpoint.
    """
    records = _records(bank)
    if records is None or records.device.type != device.type:
        raise ConfigError(
            f"the experts' addresses are not of records on {device}: GPU kernels read packed "
            "records in the device's memory; bind slots there, or compute these on the CPU"
        )
    gate, up, down = (_device_part(part, records) for part in (bank.gate, bank.up, bank.down))
    return DeviceBank(records, gate, up, down, bank.activation)


def _records(bank: ExpertBank) -> Tensor | None:
    if len(bank.owners) != 1:
        return None
    owner = bank.owners[0]
    records = torch.from_numpy(owner) if isinstance(owner, np.ndarray) else owner
    whole = isinstance(records, Tensor) and records.dtype is torch.uint8 and records.dim() == 2
    return records if whole and len(records) == bank.experts else None


def _device_part(part: ExpertPart, records: Tensor) -> DevicePart:
    return DevicePart(
        part.format,
        part.rows,
        part.cols,
        codes=_offset(part.codes, records),
        scales=_offset(part.scales, records),
        factor=NONE if part.factors is None else _offset(part.factors, records),
        bias=NONE if part.biases is None else _offset(part.biases, records),
    )


def _offset(addresses: npt.NDArray[np.uint64], records: Tensor) -> int:
    """Where in each record a plane begins."""
    return int(addresses[0]) - records.data_ptr()
