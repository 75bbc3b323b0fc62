"""Looking at the machine. Nothing is changed, and a machine without a GPU is a normal case."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from freetoken import _native
from freetoken._version import __version__
from freetoken.config import size
from freetoken.doctor.gpus import LIBRARIES, TIME_LIMIT_SECONDS, open_driver, torch_gpus
from freetoken.doctor.report import (
    CpuReport,
    DriverReport,
    GpuReport,
    MemoryReport,
    Report,
    SoftwareReport,
)
from freetoken.engine.hardware import detect_hardware, read_meminfo
from freetoken.errors import FreeTokenError
from freetoken.kernels.cpu import CpuOps
from freetoken.platforms import select_platform


def auto_device() -> str:
    """The device of the platform that `--device auto` gives."""
    chosen = select_platform("auto")
    try:
        return chosen.device
    finally:
        chosen.close()


@dataclass(frozen=True)
class Sources:
    """Where findings come from: the machine, unless a test has something else. `libraries` has the
    path of each vendor's driver; None: the system's."""

    root: Path = Path("/")
    libraries: Mapping[str, str | None] = field(default_factory=lambda: dict.fromkeys(LIBRARIES))
    gpus: Callable[[], Sequence[GpuReport]] = torch_gpus
    auto_device: Callable[[], str] = auto_device
    time_limit_seconds: float = TIME_LIMIT_SECONDS


def examine(sources: Sources | None = None, *, read_gbps: float | None = None) -> Report:
    """Everything but the read bandwidth, which the caller may have measured."""
    sources = sources or Sources()
    problems: list[str] = []
    gpus: tuple[GpuReport, ...] = ()
    unseen, refusal = "", ""
    try:
        gpus = tuple(sources.gpus())
    except RuntimeError as error:  # of torch, whose errors are no narrower
        unseen = f"PyTorch fails to look at the GPUs: {error}"
    try:
        device = sources.auto_device()
    except (FreeTokenError, RuntimeError) as error:  # drivers' and torch's among the latter
        refusal, device = f"--device auto fails: {error}", "none"
    drivers = tuple(  # last: trying a mechanism may hang the device
        open_driver(vendor, library, sources.time_limit_seconds)
        for vendor, library in sources.libraries.items()
    )
    problems += _driver_problems(gpus, drivers)
    problems += [problem for problem in (unseen, refusal) if problem]
    return Report(
        software=_software(),
        cpu=_cpu(sources.root, read_gbps),
        memory=_memory(sources.root),
        gpus=gpus,
        drivers=drivers,
        auto_device=device,
        auto_reason=_why(device, gpus, drivers, problems),
        problems=tuple(problems),
    )


def _driver_problems(gpus: tuple[GpuReport, ...], drivers: tuple[DriverReport, ...]) -> list[str]:
    """A GPU that torch sees and whose driver cannot be used. A driver without GPU is none."""
    by_vendor = {driver.vendor: driver for driver in drivers}
    found = []
    for vendor in sorted({gpu.vendor for gpu in gpus}):
        driver = by_vendor.get(vendor)
        if driver is not None and driver.problem:
            found.append(f"PyTorch sees a GPU, but {driver.library} is of no use: {driver.problem}")
    return found


def _why(
    device: str,
    gpus: tuple[GpuReport, ...],
    drivers: tuple[DriverReport, ...],
    problems: list[str],
) -> str:
    if problems:
        return problems[0]
    if not gpus:
        present = [driver for driver in drivers if driver.found]
        if not present:
            return "no GPU driver library was found"
        if present[0].problem:
            return f"no GPU was found: {present[0].library} says {present[0].problem}"
        return (
            f"{present[0].library} works, but PyTorch {torch.__version__} sees no GPU; install a "
            "build of PyTorch for it"
        )
    gpu = gpus[0]
    seen = f"PyTorch sees {gpu.name} with {size(gpu.free_bytes)} free"
    if device == "cpu":
        return f"{seen}, but auto does not take it"
    used = next(
        (m for d in drivers if d.vendor == gpu.vendor for m in d.mechanisms if m.used), None
    )
    if used is None:
        return seen
    how = "in graphs" if used.graph else "without graphs"
    return f"{seen}, and it and the CPU wait for each other by {used.name}, {how}"


def _software() -> SoftwareReport:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return SoftwareReport(
        freetoken=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        torch_hip=torch.version.hip,
        triton=triton,
    )


def _cpu(root: Path, read_gbps: float | None) -> CpuReport:
    ops = CpuOps()
    try:
        isa, threads = ops.description, ops.threads
    finally:
        ops.close()
    return CpuReport(
        model=_cpu_model(root),
        isa=isa,
        detected=tuple(_native.detected_isas()),
        physical_cores=len(_native.physical_cpus()),
        logical_cpus=len(os.sched_getaffinity(0)),
        threads=threads,
        numa_nodes=max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*")))),
        read_gbps=read_gbps,
    )


def _cpu_model(root: Path) -> str:
    file = root / "proc/cpuinfo"
    for line in file.read_text().splitlines() if file.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _memory(root: Path) -> MemoryReport:
    meminfo, hardware = read_meminfo(root), detect_hardware(root)
    return MemoryReport(
        total_bytes=meminfo["MemTotal"],
        available_bytes=meminfo["MemAvailable"],
        usable_bytes=hardware.memory_bytes,
        pinnable_bytes=hardware.pinnable_bytes or 0,
        memlock_bytes=hardware.memlock_bytes,
    )
