"""The contract of a checkpoint: named tensors as byte views, and metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from freetoken.formats.base import WeightFormat, times_factor


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint, not copied.

    `shape` is row-major with the contiguous dimension last ([E, N, K] for stacked experts), in
    elements. `data` is a read-only, contiguous, one-dimensional view of exactly the tensor's bytes
    over the memory map; it keeps the map alive.

    A format whose scales lie apart has them in `scales`: the bytes of one `scale_plane` for each
    matrix [N, K], contiguous and one-dimensional. `factors` multiplies each matrix as a whole:
    float32 of the shape without the last two dimensions; None: one.
    """

    name: str
    format: WeightFormat
    shape: tuple[int, ...]
    file: Path
    data: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8] | None = None
    factors: npt.NDArray[np.float32] | None = None

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The whole tensor as float32, in `shape`. For small tensors and tests."""
        cols = self.shape[-1] if self.shape else 1
        rows = self.data.reshape(*self.shape[:-1], self.format.row_bytes(cols))
        factors = 1.0 if self.factors is None else self.factors
        if self.scales is None:
            numbers = self.format.dequantize(rows).reshape(self.shape)
            return times_factor(numbers, factors).reshape(self.shape)
        plane = self.format.scale_plane(self.shape[-2], cols)
        scales = self.scales.reshape(*self.shape[:-2], *plane)
        return self.format.dequantize_planes(rows, scales, factors)


class Checkpoint(Protocol):
    """An open checkpoint. Opening it has checked every header; tensors can be trusted to lie
    inside their files, with the bytes that their shape and format imply."""

    @property
    def kind(self) -> Literal["gguf", "safetensors"]: ...

    @property
    def path(self) -> Path:
        """What was opened; errors name it. GGUF: the file that was given. safetensors: the
        directory, also if one of its files was given; the tokenizer's files are there."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF: the key-value pairs. Hugging Face: the content of config.json."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Hugging Face: the content of generation_config.json. Empty if there is none."""
        ...

    def names(self) -> Iterable[str]:
        """All tensor names."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str) -> TensorEntry:
        """The tensor of that name. Raises CheckpointError if there is none."""
        ...

    def file_bytes(self) -> int:
        """Size on disk of all files that hold tensors."""
        ...

    def close(self) -> None:
        """Drop the maps. Views handed out before stay valid (they hold their map)."""
        ...
