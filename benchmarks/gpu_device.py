"""The GPU that a benchmark or a test runs on, and what stands in for it where there is none.

Without a GPU Triton's interpreter runs the cache's kernels on CPU tensors, the CPU's kernels
compute the GPU's experts too (the interpreter would take minutes), a "graph" is the work itself,
called again, and a handshake's job runs when it is submitted. That finds mistakes in the programs
that use it, and says nothing about speed or about drivers.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.kernels.base import ExpertBank
from freetoken.moe.on_gpu import gpu_experts
from freetoken.moe.runtime import GpuExperts
from freetoken.platforms.gpu import GpuPlatform
from freetoken.platforms.graphs import Graph, TorchGraphs

Work = Callable[[], object]


class Device(Protocol):
    """Where kernels run and how long they take."""

    device: torch.device
    name: str

    def platform(self, threads: int | None, cpu_activations: str) -> GpuPlatform: ...

    def synchronize(self) -> None: ...

    def capture(self, work: Work) -> Graph:
        """Capture `work`, which has run eagerly before with the same shapes, as engines do."""
        ...

    def seconds(self, work: Work, repeats: int) -> float:
        """Device time of one of `repeats` calls that follow one another without a pause."""
        ...

    def release_memory(self) -> None:
        """Give what no tensor uses any more back to the driver."""
        ...


class CudaDevice:
    """torch's current GPU, of either vendor."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.device)
        self._graphs = TorchGraphs(self.device)
        self._nothing = torch.empty(0, device=self.device)

    def platform(self, threads: int | None, cpu_activations: str) -> GpuPlatform:
        return GpuPlatform(self.device, threads, cpu_activations)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def capture(self, work: Work) -> Graph:
        return self._graphs.capture(lambda: _then(work, self._nothing))

    def seconds(self, work: Work, repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        self.synchronize()
        return start.elapsed_time(end) / repeats * 1e-3

    def release_memory(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def _then(work: Work, result: Tensor) -> Tensor:
    work()
    return result


class _Again:
    """Stands in for a graph."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def replay(self) -> Tensor:
        return _then(self._work, torch.empty(0))

    def close(self) -> None:
        pass


class DryDevice:
    """The CPU in place of a GPU. TRITON_INTERPRET=1 must have been set before triton came in."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name = "no GPU: Triton's interpreter"

    def platform(self, threads: int | None, cpu_activations: str) -> GpuPlatform:
        return _DryPlatform(threads, cpu_activations)

    def synchronize(self) -> None:
        pass

    def capture(self, work: Work) -> Graph:
        return _Again(work)

    def seconds(self, work: Work, repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - start) / repeats

    def release_memory(self) -> None:
        gc.collect()


class _DryPlatform(GpuPlatform):
    def __init__(self, threads: int | None, cpu_activations: str) -> None:
        super().__init__(
            torch.device("cpu"),
            threads,
            cpu_activations,
            streams=_HostStreams(),
            graphs=_NoGraphs(),
        )

    @property
    def handshake_choice(self) -> Any:
        return SimpleNamespace(capturable=True)

    def handshake(self) -> Any:
        return _DirectHandshake(self.cpu_ops)


class _HostStreams:
    """GpuStreams that do at once what they are told."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def current(self) -> int:
        return 0

    def capturing(self) -> bool:
        return False

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


class _NoGraphs:
    """GraphDevice for an engine, whose steps then run eagerly."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def capture(self, work: Callable[[], Tensor]) -> Any:
        raise RuntimeError("a dry run has no graphs")

    def synchronize(self) -> None:
        pass


class _DirectHandshake:
    """`_native.GpuHandshake` without a driver: a job runs when it is submitted."""

    name = "none"
    capturable = True

    def __init__(self, cpu_ops: Any) -> None:
        self._context = cpu_ops._context
        self._jobs: list[tuple[Any, ...]] = []

    def add_experts(self, *job: Any) -> int:
        self._jobs.append(job[:-1])  # the last is its name
        return len(self._jobs) - 1

    def submit(self, slot: int, stream: int) -> None:
        self._context.experts(*self._jobs[slot])

    def wait(self, slot: int, stream: int) -> None:
        pass

    def announce(self, handshakes: int) -> None:
        pass

    def check(self) -> None:
        pass

    def clear(self) -> None:
        pass

    def close(self) -> None:
        self._jobs.clear()


def runtime_experts(platform: GpuPlatform) -> GpuExperts:
    """What a runtime needs of the platform's GPU; in a dry run the CPU's kernels compute there."""
    experts = gpu_experts(platform)
    if not isinstance(platform, _DryPlatform):
        return experts
    cpu_ops = platform.cpu_ops
    return replace(
        experts, bind=lambda layout, records: cpu_ops.expert_kernel(layout.bank(records))
    )


class ReusedMemory:
    """The memory of a platform, of which each runtime gets what the one before had: pinning
    gigabytes takes longer than filling them again. One runtime at a time; `rewind` in between."""

    def __init__(self, platform: GpuPlatform) -> None:
        self._platform = platform
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._next = 0
        self._pinned: dict[int, Tensor] = {}  # by address

    def rewind(self) -> None:
        self._next = 0

    def allocate(self, size_bytes: int, /) -> npt.NDArray[np.uint8]:
        if self._next == len(self._blocks):
            self._blocks.append(self._platform.allocate(size_bytes))
        block = self._blocks[self._next]
        self._next += 1
        if len(block) != size_bytes:
            raise RuntimeError(
                f"a runtime asks for {size_bytes} bytes where the one before had {len(block)}; "
                "expected runtimes of the same layers"
            )
        return block

    def allocate_slots(self, size_bytes: int, /) -> Tensor:
        return self._platform.allocate_slots(size_bytes)

    def pin(self, memory: Tensor, /) -> bool:
        if memory.data_ptr() not in self._pinned:
            if not self._platform.pin(memory):
                return False
            self._pinned[memory.data_ptr()] = memory  # kept, so that it stays pinned
        return True

    def place(self, bank: ExpertBank, *, mapped: bool) -> None:
        self._platform.place(bank, mapped=mapped)


def handshake_findings(platform: GpuPlatform) -> list[dict[str, Any]]:
    """What the probes of the platform's mechanisms said; nothing without a driver."""
    if isinstance(platform, _DryPlatform):
        return []
    return [
        {"name": f.name, "eager": f.eager, "graph": f.graph, "reason": f.reason}
        for f in platform.handshake_choice.findings
    ]


__all__ = [
    "CudaDevice",
    "Device",
    "DryDevice",
    "ReusedMemory",
    "handshake_findings",
    "runtime_experts",
]
