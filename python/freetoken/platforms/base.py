"""The contract of a platform: where tensors live and what computes on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from freetoken import _native
from freetoken.kernels.base import ExpertBank, Ops
from freetoken.kernels.cpu import CpuOps
from freetoken.platforms.graphs import GraphDevice
from freetoken.platforms.streams import GpuStreams

if TYPE_CHECKING:  # it needs triton
    from freetoken.kernels.triton.ops import TritonOps


class GpuSide(Protocol):
    """What a GPU adds to a platform."""

    @property
    def ops(self) -> TritonOps: ...

    @property
    def streams(self) -> GpuStreams: ...

    @property
    def graphs(self) -> GraphDevice: ...

    def handshake(self) -> _native.GpuHandshake:
        """A new one, for the owner to close before the platform. Raises FreeTokenError if none
        works."""
        ...


class SlotMemory(Protocol):
    """The part of a platform that stores of experts need."""

    def allocate(self, size_bytes: int, /) -> npt.NDArray[np.uint8]:
        """Zeroed host memory for packed experts: uint8 [size_bytes], beginning at a multiple of
        `host_memory.ALIGNMENT_BYTES`. Raises CapacityError if there is too little."""
        ...

    def allocate_slots(self, size_bytes: int, /) -> Tensor:
        """The same in the device's memory, where slots lie. On a CPU that is host memory."""
        ...

    def pin(self, memory: Tensor, /) -> bool:
        """Let the device read host memory, uint8 [size_bytes], while that lives. False where the
        system refuses, which is a normal case; then nothing has changed."""
        ...

    def place(self, bank: ExpertBank, *, mapped: bool) -> None:
        """Before memory of `allocate` is written (`mapped` False), or a checkpoint's own bytes
        are used (`mapped` True): see that each expert's rows lie near the CPU threads that will
        read them. Does nothing where all memory is as near, or where it is settled already."""
        ...


class Platform(SlotMemory, Protocol):
    """One device and its operators. Lives as long as the model that was loaded onto it."""

    @property
    def device(self) -> str:
        """As torch names it, e.g. "cpu" or "cuda:0"."""
        ...

    @property
    def description(self) -> str:
        """For reports, e.g. "CPU, 2 threads, avx2"."""
        ...

    @property
    def ops(self) -> Ops:
        """The platform's operators: one object, made once."""
        ...

    @property
    def cpu_ops(self) -> CpuOps:
        """The operators that compute experts in host memory; on a CPU the same object."""
        ...

    @property
    def gpu(self) -> GpuSide | None:
        """None on a CPU."""
        ...

    def close(self) -> None:
        """End the worker threads. The operators cannot be used afterwards."""
        ...
