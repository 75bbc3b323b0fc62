"""Experts in the GPU's memory: what a kernel needs to know of a bank of records."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freetoken.formats.base import WeightFormat
from freetoken.kernels.activations import Activation
from freetoken.kernels.triton.formats import TritonFormat, triton_format

NONE = -1  # the offset of what a record has not


@dataclass(frozen=True)
class DevicePart:
    """One part of an expert, [rows, cols], inside its record: byte offsets of its planes.

    `factor` is where its float32 factor lies, `bias` its float32 [rows]; `NONE` if it has none.
    """

    format: WeightFormat
    rows: int
    cols: int
    codes: int
    scales: int
    factor: int = NONE
    bias: int = NONE

    @property
    def kernels(self) -> TritonFormat:
        """Raises CheckpointError for a format without GPU kernels."""
        return triton_format(self.format)

    @property
    def whole_units(self) -> bool:
        """Whether `TritonFormat.dot` can read its rows."""
        return self.cols % self.kernels.unit == 0

    def planes(self, prefix: str) -> dict[str, int]:
        """Where a kernel finds them, as its constants PREFIX_CODES and so on."""
        fmt = self.format
        values = {
            "CODES": self.codes,
            "SCALES": self.scales,
            "CODE_STRIDE": fmt.code_row_bytes(self.cols),
            "SCALE_STRIDE": fmt.scale_plane(self.rows, self.cols)[1],
            "FACTOR": self.factor,
            "BIAS": self.bias,
        }
        return {f"{prefix}_{name}": value for name, value in values.items()}


@dataclass(frozen=True)
class DeviceBank:
    """The experts of one layer, or the slots of one layer's pool, in the device's memory.

    `records` uint8 [n, record_bytes] is contiguous, its planes begin at multiples of 16 bytes.
    gate and up are [I, H], down is [H, I].
    """

    records: Tensor
    gate: DevicePart
    up: DevicePart
    down: DevicePart
    activation: Activation

    @property
    def experts(self) -> int:
        return self.records.shape[0]
