"""What `ft doctor` prints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import typer

from freetoken.config import size
from freetoken.doctor import DriverReport, GpuReport, MechanismReport, Report, examine


def run(*, bench: bool, as_json: bool) -> None:
    """Print the report. Exit status 1 if something is broken."""
    read_gbps = None
    if bench:
        from freetoken.bench import measure_memory

        read_gbps = measure_memory().read_gbps
    report = examine(read_gbps=read_gbps)
    typer.echo(json.dumps(dataclasses.asdict(report)) if as_json else "\n".join(lines(report)))
    if report.problems:
        raise typer.Exit(1)


def lines(report: Report) -> Iterator[str]:
    """The report as text; the last line says what `--device auto` resolves to, and why."""
    yield from _software(report)
    yield from _cpu(report)
    yield from _memory(report)
    for index, gpu in enumerate(report.gpus):
        yield from _gpu(index, gpu)
    for driver in report.drivers:
        yield from _driver(driver)
    for problem in report.problems:
        yield f"broken:     {problem}"
    yield f"--device auto: {report.auto_device}, because {report.auto_reason}"


def _software(report: Report) -> Iterator[str]:
    software = report.software
    built = "without GPU support"
    if software.torch_cuda is not None:
        built = f"for CUDA {software.torch_cuda}"
    if software.torch_hip is not None:
        built = f"for ROCm {software.torch_hip}"
    yield f"freetoken:  {software.freetoken}, Python {software.python}"
    yield f"PyTorch:    {software.torch}, built {built}; Triton {software.triton or 'missing'}"


def _cpu(report: Report) -> Iterator[str]:
    cpu = report.cpu
    yield f"CPU:        {cpu.model}"
    yield f"  kernels   {cpu.isa} (there are {', '.join(cpu.detected)})"
    yield (
        f"  cores     {cpu.physical_cores} physical, {cpu.logical_cpus} logical, "
        f"{cpu.numa_nodes} NUMA node{'s' if cpu.numa_nodes > 1 else ''}; {cpu.threads} threads used"
    )
    if cpu.read_gbps is not None:
        yield f"  reads     {cpu.read_gbps:.2f} GB/s"


def _memory(report: Report) -> Iterator[str]:
    memory = report.memory
    yield (
        f"memory:     {size(memory.available_bytes)} of {size(memory.total_bytes)} available"
        + (f", a control group leaves {size(memory.usable_bytes)}" if memory.is_limited else "")
    )
    limit = memory.memlock_bytes
    locked = "" if limit is None else f"; limit on locked memory {size(limit)} (ulimit -l)"
    yield f"  pinnable  {size(memory.pinnable_bytes)}{locked}"


def _gpu(index: int, gpu: GpuReport) -> Iterator[str]:
    yield (
        f"GPU {index}:      {gpu.name}, {gpu.architecture}, driver {gpu.driver or 'unknown'}, "
        f"{size(gpu.free_bytes)} of {size(gpu.total_bytes)} free"
    )


def _driver(driver: DriverReport) -> Iterator[str]:
    title = f"{driver.vendor + ':':12}"
    if driver.problem:
        yield f"{title}{driver.library}: {driver.problem}"
        return
    graphs = "safe" if driver.graphs_safe else "off, steps run one by one"
    yield f"{title}{driver.library}; graphs are {graphs}"
    for mechanism in driver.mechanisms:
        yield f"  {_verdict(mechanism)}"


def _verdict(mechanism: MechanismReport) -> str:
    verdict = "refused"
    if mechanism.eager:
        verdict = "passed" if mechanism.graph else "passed without graphs"
    used = ", used" if mechanism.used else ""
    reason = f": {mechanism.reason}" if mechanism.reason else ""
    return f"{mechanism.name}: {verdict}{used}{reason}"
