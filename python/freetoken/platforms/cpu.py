"""The CPU as a platform. The slot pool lies in host memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.kernels.base import ExpertBank
from freetoken.kernels.cpu import CpuOps
from freetoken.platforms.host_memory import allocate


class CpuPlatform:
    """freetoken.platforms.base.Platform. `threads`: default one per physical core.
    `cpu_activations`: "int8" or "exact"."""

    def __init__(self, threads: int | None = None, cpu_activations: str = "int8") -> None:
        self._ops = CpuOps(threads, activations=cpu_activations)

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def description(self) -> str:
        threads = self._ops.threads
        return f"CPU, {threads} thread{'s' if threads != 1 else ''}, {self._ops.description}"

    @property
    def ops(self) -> CpuOps:
        return self._ops

    @property
    def cpu_ops(self) -> CpuOps:
        return self._ops

    @property
    def gpu(self) -> None:
        return None

    def allocate(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        return allocate(size_bytes)

    def place(self, bank: ExpertBank, *, mapped: bool) -> None:
        self._ops.place(bank, mapped=mapped)

    def allocate_slots(self, size_bytes: int) -> Tensor:
        return torch.from_numpy(allocate(size_bytes, slots=True))

    def pin(self, memory: Tensor) -> bool:
        return True  # the CPU reads it as it is

    def close(self) -> None:
        self._ops.close()
