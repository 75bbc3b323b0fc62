"""Weight matrices in the GPU's memory: a plane of codes and a plane of scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freetoken.checkpoints.base import TensorEntry
from freetoken.errors import CheckpointError
from freetoken.formats.base import Bytes, WeightFormat
from freetoken.formats.planes import copy_field
from freetoken.kernels.triton.formats import TritonFormat, triton_format


@dataclass(frozen=True)
class TritonMatrix:
    """A weight matrix [rows, cols], copied to the device.

    `codes` and `scales` are uint8 and one-dimensional, rows one after the other (where a format has
    no scales, `scales` is `codes`, which nothing reads as such). `factor` multiplies all numbers.
    `weight_format` is that of the numbers.
    """

    weight_format: WeightFormat
    format: TritonFormat
    rows: int
    cols: int
    codes: Tensor
    scales: Tensor
    code_row_stride: int
    scale_row_stride: int
    factor: float

    @staticmethod
    def of(entry: TensorEntry, device: torch.device) -> TritonMatrix:
        """Raises CheckpointError for a format without kernel, and for what is no matrix."""
        if len(entry.shape) != 2:
            raise CheckpointError(
                "the tensor is no matrix",
                file=entry.file,
                tensor=entry.name,
                found=f"shape {list(entry.shape)}",
                expected="two dimensions",
                hint="the checkpoint does not fit its architecture; fetch it again",
            )
        rows, cols = entry.shape
        fmt = entry.format
        kernels = triton_format(fmt)
        codes, scales = _planes(entry)
        on_device = torch.from_numpy(codes).to(device)
        return TritonMatrix(
            weight_format=fmt,
            format=kernels,
            rows=rows,
            cols=cols,
            codes=on_device,
            scales=on_device if scales is None else torch.from_numpy(scales).to(device),
            code_row_stride=fmt.code_row_bytes(cols),
            scale_row_stride=fmt.scale_plane(rows, cols)[1],
            factor=1.0 if entry.factors is None else float(entry.factors),
        )


def _planes(entry: TensorEntry) -> tuple[Bytes, Bytes | None]:
    """Copies of the codes and of the scales, each in memory of its own."""
    fmt = entry.format
    rows, cols = entry.shape
    codes = np.empty(rows * fmt.code_row_bytes(cols), np.uint8)
    copy_field(entry.data, fmt.block_bytes, fmt.codes, codes)
    if entry.scales is not None:
        return codes, entry.scales.copy()
    if fmt.scales.bytes == 0:
        return codes, None
    scale_rows, row_bytes = fmt.scale_plane(rows, cols)
    scales = np.empty(scale_rows * row_bytes, np.uint8)
    copy_field(entry.data, fmt.block_bytes, fmt.scales, scales)
    return codes, scales
