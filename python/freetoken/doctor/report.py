"""The findings, as data: `dataclasses.asdict` is what `ft doctor --json` prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SoftwareReport:
    """Versions. `triton` is None if it is not installed; `torch_cuda` and `torch_hip` are what
    torch was built for, None for neither."""

    freetoken: str
    python: str
    torch: str
    torch_cuda: str | None
    torch_hip: str | None
    triton: str | None


@dataclass(frozen=True)
class CpuReport:
    """`isa` is the instruction set that is used, of those `detected` that have kernels, best last.
    `threads` start if none are asked for. `read_gbps` is None unless it was measured."""

    model: str
    isa: str
    detected: tuple[str, ...]
    physical_cores: int
    logical_cpus: int
    threads: int
    numa_nodes: int
    read_gbps: float | None = None


@dataclass(frozen=True)
class MemoryReport:
    """Host memory. `usable_bytes` is what is available, or what control groups leave if less."""

    total_bytes: int
    available_bytes: int
    usable_bytes: int
    pinnable_bytes: int
    memlock_bytes: int | None

    @property
    def is_limited(self) -> bool:
        """Whether a control group leaves less than the machine has."""
        return self.usable_bytes < self.available_bytes


@dataclass(frozen=True)
class MechanismReport:
    """One way for a stream and the CPU to wait for each other. `reason`: why it does not pass, on
    a stream (`eager`) or in a replayed `graph`; empty if it does both. At most one is `used`."""

    name: str
    eager: bool
    graph: bool
    used: bool
    reason: str


@dataclass(frozen=True)
class DriverReport:
    """A vendor's driver library. `problem`: why it cannot be used; empty if it can. `graphs_safe`:
    whether decode steps can be captured with the mechanism that is used."""

    vendor: str
    library: str
    found: bool
    problem: str
    graphs_safe: bool = False
    mechanisms: tuple[MechanismReport, ...] = ()


@dataclass(frozen=True)
class GpuReport:
    """A GPU that torch sees. `vendor` is "cuda" or "rocm"; `driver` the kernel driver's version,
    empty if it says none; `architecture` such as "sm_90" or "gfx1100"."""

    name: str
    vendor: str
    architecture: str
    driver: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Report:
    """Everything. `auto_device` is what `--device auto` resolves to and `auto_reason` why;
    `problems` are broken and have to be mended: there are none where there simply is no GPU."""

    software: SoftwareReport
    cpu: CpuReport
    memory: MemoryReport
    gpus: tuple[GpuReport, ...]
    drivers: tuple[DriverReport, ...]
    auto_device: str
    auto_reason: str
    problems: tuple[str, ...]
