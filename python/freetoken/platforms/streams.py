"""Memory and copies in the order of a GPU's current stream."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class PinnedMemory(Protocol):
    """Host memory that a device copies from and to by itself, also in replays of a graph."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Contiguous and zeroed."""
        ...


class GpuStreams(PinnedMemory, Protocol):
    """What a GPU platform gives: memory and copies, in the order of the current stream."""

    def current(self) -> int:
        """The driver's handle of the current stream."""
        ...

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Put a copy on the current stream and return at once. Same shapes, contiguous."""
        ...


class TorchPinned:
    """PinnedMemory of torch, for any device of either vendor."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)


class TorchStreams(TorchPinned):
    """GpuStreams of torch, for one device of either vendor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def capturing(self) -> bool:
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
