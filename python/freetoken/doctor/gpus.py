"""The GPUs that torch sees, the drivers' libraries, and the ways to wait that work."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from freetoken import _native
from freetoken.doctor.report import DriverReport, GpuReport, MechanismReport

VENDORS = {"cuda": _native.Vendor.Cuda, "rocm": _native.Vendor.Rocm}
LIBRARIES = {"cuda": "libcuda.so.1", "rocm": "libamdhip64.so"}

# Of one mechanism, if it hangs; enough for a machine that is busy.
TIME_LIMIT_SECONDS = 5.0


def torch_gpus(root: Path = Path("/")) -> tuple[GpuReport, ...]:
    """What torch names "cuda:0", "cuda:1", ..., of either vendor."""
    if not torch.cuda.is_available():
        return ()
    return tuple(_gpu(index, root) for index in range(torch.cuda.device_count()))


def _gpu(index: int, root: Path) -> GpuReport:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    is_rocm = torch.version.hip is not None
    return GpuReport(
        name=properties.name,
        vendor="rocm" if is_rocm else "cuda",
        architecture=properties.gcnArchName.split(":")[0]
        if is_rocm
        else f"sm_{properties.major}{properties.minor}",
        driver=_rocm_driver(root) if is_rocm else _nvidia_driver(root),
        total_bytes=total,
        free_bytes=free,
    )


def _nvidia_driver(root: Path) -> str:
    """From a line such as "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  <date>"."""
    file = root / "proc/driver/nvidia/version"
    for line in file.read_text().splitlines() if file.exists() else ():
        if line.startswith("NVRM version:"):
            return next((w for w in line.split() if w[0].isdigit() and "." in w), "")
    return ""


def _rocm_driver(root: Path) -> str:
    file = root / "sys/module/amdgpu/version"
    return file.read_text().strip() if file.exists() else ""


def open_driver(
    vendor: str, library: str | None = None, time_limit_seconds: float = TIME_LIMIT_SECONDS
) -> DriverReport:
    """Open a vendor's library, and try every way to wait, each for so long. `library`: its path;
    None: the one that this process has loaded already, else the system's."""
    name = library or LIBRARIES[vendor]
    if not _is_found(name):
        return DriverReport(vendor, name, found=False, problem="the library was not found")
    try:
        driver = _native.GpuDriver(VENDORS[vendor], library or "")
        choice = driver.choose(time_limit_seconds=time_limit_seconds)
    except _native.DriverError as error:
        return DriverReport(vendor, name, found=True, problem=str(error))
    findings = {finding.mechanism: finding for finding in choice.findings}
    for mechanism in _native.Mechanism:  # those that were not needed are of interest all the same
        if mechanism in findings:
            continue
        if any(finding.hung for finding in findings.values()):
            break
        findings[mechanism] = driver.probe(mechanism, time_limit_seconds=time_limit_seconds)
    mechanisms = tuple(
        _mechanism(findings[mechanism], used=mechanism == choice.mechanism)
        for mechanism in _native.Mechanism
        if mechanism in findings
    )
    return DriverReport(vendor, name, True, "", choice.capturable, mechanisms)


def _mechanism(finding: _native.HandshakeFinding, *, used: bool) -> MechanismReport:
    return MechanismReport(finding.name, finding.eager, finding.graph, used, finding.reason)


def _is_found(library: str) -> bool:
    """Whether the process has loaded it (torch brings its own of ROCm), or the system can."""
    maps = Path("/proc/self/maps")
    if maps.exists() and f"/{Path(library).name}" in maps.read_text():
        return True
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
