"""A GPU, NVIDIA's or AMD's, as a platform: Triton's kernels there, the CPU's kernels beside it.

Both vendors' devices are "cuda" to torch; `torch.version.hip` tells which it is. What differs
between them is the driver library that the handshakes open, and nothing here but its name.
"""

from __future__ import annotations

import logging
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken import _native
from freetoken.errors import ConfigError, FreeTokenError
from freetoken.kernels.base import ExpertBank
from freetoken.kernels.cpu import CpuOps
from freetoken.kernels.triton.ops import TritonOps
from freetoken.platforms import gpu_memory
from freetoken.platforms.graphs import GraphDevice, TorchGraphs
from freetoken.platforms.host_memory import allocate
from freetoken.platforms.streams import GpuStreams, TorchStreams

_log = logging.getLogger(__name__)

# A step that makes no progress for so long is taken for lost.
_STALL_LIMIT_SECONDS = 30.0
# On fewer cores a thread of experts gains more than a core to itself saves the one that answers.
_CORES_TO_SPARE_ONE = 4


def _cpu_threads(cores: int) -> int:
    """Threads for the CPU's experts, by default: one per physical core, but one core is left to the
    thread that answers the GPU's stream where there are four or more."""
    return cores - 1 if cores >= _CORES_TO_SPARE_ONE else cores


class GpuPlatform:
    """freetoken.platforms.base.Platform for one device of torch.

    `threads` (default: `_cpu_threads` of the physical cores that the process may use) and
    `cpu_activations` are those of the CPU's kernels, which compute what the GPU does not.
    `driver_library`, `streams` and `graphs` are for tests; by default they are the system's and
    torch's. Raises ConfigError if the driver cannot be opened.
    """

    def __init__(
        self,
        device: torch.device,
        threads: int | None = None,
        cpu_activations: str = "int8",
        *,
        driver_library: str = "",
        streams: GpuStreams | None = None,
        graphs: GraphDevice | None = None,
    ) -> None:
        self._device = device
        self._ops = TritonOps(device)
        if threads is None:
            threads = _cpu_threads(len(_native.physical_cpus()))
        self._cpu_ops = CpuOps(threads, activations=cpu_activations)
        self._driver_library = driver_library
        self._streams = streams or TorchStreams(device)
        self._graphs = graphs

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def description(self) -> str:
        cpu = self._cpu_ops
        return f"{self._ops.description}, and the CPU with {cpu.threads} threads, {cpu.description}"

    @property
    def ops(self) -> TritonOps:
        return self._ops

    @property
    def gpu(self) -> GpuPlatform:
        return self

    @property
    def streams(self) -> GpuStreams:
        return self._streams

    @cached_property
    def graphs(self) -> GraphDevice:
        return self._graphs or TorchGraphs(self._device)

    @property
    def cpu_ops(self) -> CpuOps:
        return self._cpu_ops

    @cached_property
    def driver(self) -> _native.GpuDriver:
        vendor = _native.Vendor.Rocm if torch.version.hip else _native.Vendor.Cuda
        try:
            return _native.GpuDriver(vendor, self._driver_library, self._device.index or 0)
        except RuntimeError as error:
            raise ConfigError(
                f"the driver of {self.device} cannot be opened: {error}; mend the driver's "
                "installation, or use --device cpu"
            ) from error

    @cached_property
    def handshake_choice(self) -> _native.HandshakeChoice:
        """The mechanism by which streams and CPU threads wait for each other here. The first call
        tries them, which takes seconds, and logs what was found (that graphs have to do without
        one is a warning of freetoken.models.graphed)."""
        try:
            choice = self.driver.choose()
        except RuntimeError as error:
            raise FreeTokenError(
                f"no way for {self.device} and the CPU to wait for each other works: {error}; "
                "use --strategy fused or offload, which need none, or --device cpu"
            ) from error
        for finding in choice.findings:
            _log.info("handshake by %s: %s", finding.name, finding.reason or "works in graphs")
        return choice

    def handshake(self) -> _native.GpuHandshake:
        """A new one, for the owner to close before the platform."""
        choice = self.handshake_choice
        return self._cpu_ops.handshake(
            self.driver, choice.mechanism, choice.capturable, _STALL_LIMIT_SECONDS
        )

    def allocate(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        return allocate(size_bytes)

    def place(self, bank: ExpertBank, *, mapped: bool) -> None:
        self._cpu_ops.place(bank, mapped=mapped)

    def allocate_slots(self, size_bytes: int) -> Tensor:
        return gpu_memory.allocate_slots(size_bytes, self._device)

    def pin(self, memory: Tensor) -> bool:
        return self._device.type == "cpu" or gpu_memory.pin(memory)

    def close(self) -> None:
        self._cpu_ops.close()
