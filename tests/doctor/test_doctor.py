"""What `ft doctor` finds and says, over fake drivers and fake GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner, Result

from freetoken.cli import doctor as command
from freetoken.cli.app import app
from freetoken.doctor import DriverReport, GpuReport, Report, Sources, examine
from freetoken.doctor.gpus import torch_gpus
from freetoken.errors import ConfigError
from support.fake_gpu import (
    CALLBACK_NEVER_RUNS,
    DEVICE_RESET,
    OPERATION_FAILS,
    UNSUPPORTED,
    WAIT_NEVER_ENDS,
    FakeGpu,
)

RUNS_AT_CAPTURE, STALE_AFTER_200, WAIT_PASSES, CALLBACK_FAILS = 8, 16, 512, 1024
GIB = 2**30
CARD = GpuReport("Fake 9000", "cuda", "sm_90", "550.1", 24 * GIB, 20 * GIB)
NOWHERE = {"cuda": "/nowhere/libcuda.so.1", "rocm": "/nowhere/libamdhip64.so"}


def vendor_of(gpu: FakeGpu) -> str:
    return "cuda" if gpu.vendor == "cuda" else "rocm"


def look(
    gpu: FakeGpu | None,
    *,
    sees: bool = True,
    library: str | None = None,
    auto: Callable[[], str] = lambda: "cpu",
    time_limit_seconds: float = 10.0,
) -> Report:
    """With that GPU's driver alone; `sees`: whether torch sees the card too."""
    if gpu is None:
        sources = Sources(libraries=NOWHERE, gpus=tuple)
    else:
        vendor = vendor_of(gpu)
        cards = [replace(CARD, vendor=vendor)] if sees else []
        sources = Sources(
            libraries={vendor: library or gpu.path},
            gpus=lambda: cards,
            auto_device=auto,
            time_limit_seconds=time_limit_seconds,
        )
    return examine(sources)


def last_line(report: Report) -> str:
    return list(command.lines(report))[-1]


def driver_of(report: Report) -> DriverReport:
    (driver,) = report.drivers
    return driver


def test_all_mechanisms_are_tried_and_the_best_is_used(gpu: FakeGpu) -> None:
    report = look(gpu, auto=lambda: "cuda:0")
    driver = driver_of(report)
    assert (driver.found, driver.problem, driver.graphs_safe) == (True, "", True)
    memory, callbacks, waiting = driver.mechanisms
    assert (memory.eager, memory.graph, memory.used, memory.reason) == (True, True, True, "")
    assert (callbacks.eager, callbacks.graph, callbacks.used) == (True, True, False)
    assert (waiting.eager, waiting.graph, waiting.used) == (True, False, False)
    assert waiting.reason == "a graph cannot stop for its caller"
    assert report.problems == ()
    text = list(command.lines(report))
    assert f"  {memory.name}: passed, used" in text
    assert "  host callbacks: passed" in text
    assert (
        "  stream synchronisation: passed without graphs: a graph cannot stop for its caller"
    ) in text
    assert any("graphs are safe" in line for line in text)
    assert text[-1] == (
        "--device auto: cuda:0, because PyTorch sees Fake 9000 with 20.00 GiB free, and it and the "
        f"CPU wait for each other by {memory.name}, in graphs"
    )


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (UNSUPPORTED, "says that this device"),
        (OPERATION_FAILS, "FAKE_NOT_SUPPORTED"),
        (RUNS_AT_CAPTURE, "instead of recording them"),
        (WAIT_PASSES, "an eager step"),
    ],
)
def test_a_fault_of_memory_operations_is_named(gpu: FakeGpu, fault: int, reason: str) -> None:
    gpu.set_faults(fault)
    report = look(gpu, auto=lambda: "cuda:0")
    memory = driver_of(report).mechanisms[0]
    assert not memory.graph and reason in memory.reason
    assert memory.used == (gpu.vendor == "hip" and memory.eager)  # CUDA's callbacks have graphs
    shown = [line for line in command.lines(report) if memory.name in line]
    assert memory.reason in shown[0]
    assert (": passed without graphs" if memory.eager else ": refused: ") in shown[0]
    assert report.problems == ()  # something else works


def test_the_next_mechanism_and_its_limits_are_said(gpu: FakeGpu) -> None:
    gpu.set_faults(UNSUPPORTED | CALLBACK_FAILS)
    report = look(gpu, auto=lambda: "cuda:0")
    _, callbacks, waiting = driver_of(report).mechanisms
    assert not callbacks.eager and callbacks.reason
    assert waiting.used and not driver_of(report).graphs_safe
    text = "\n".join(command.lines(report))
    assert "graphs are off" in text
    assert last_line(report).endswith("by stream synchronisation, without graphs")


def test_a_callback_that_never_runs_is_waited_for_no_longer_than_asked(gpu: FakeGpu) -> None:
    gpu.set_faults(CALLBACK_NEVER_RUNS)
    callbacks = driver_of(look(gpu, time_limit_seconds=1.0)).mechanisms[1]
    assert not callbacks.eager and callbacks.reason


def test_a_device_that_hangs_is_tried_no_further(gpu: FakeGpu) -> None:
    gpu.set_faults(WAIT_NEVER_ENDS)
    report = look(gpu, auto=lambda: "cuda:0", time_limit_seconds=0.2)
    assert "hung the GPU" in driver_of(report).problem
    assert driver_of(report).mechanisms == ()
    assert "hung the GPU" in last_line(report)


def test_stale_graphs_are_refused(gpu: FakeGpu) -> None:
    gpu.set_faults(STALE_AFTER_200)
    report = look(gpu)
    memory, _, waiting = driver_of(report).mechanisms
    assert memory.eager and not memory.graph and "wrong result" in memory.reason
    assert waiting.used or memory.used  # on streams, which are right
    assert not driver_of(report).graphs_safe


def test_a_lost_device_is_broken_if_torch_sees_it(gpu: FakeGpu) -> None:
    gpu.set_faults(DEVICE_RESET)
    for sees in (True, False):
        report = look(gpu, sees=sees)
        assert driver_of(report).found and driver_of(report).problem
        assert driver_of(report).mechanisms == ()
        assert (len(report.problems) == 1) == sees
        assert driver_of(report).problem.split("\n")[0] in last_line(report)


def test_a_library_that_is_no_driver(gpu: FakeGpu, fake_libraries: dict[str, Path]) -> None:
    other = str(fake_libraries["hip" if gpu.vendor == "cuda" else "cuda"])
    report = look(gpu, library=other)
    assert report.problems and "has no " in report.problems[0]
    assert f"broken:     {report.problems[0]}" in list(command.lines(report))
    assert look(gpu, library=other, sees=False).problems == ()


def test_no_driver_at_all_is_a_normal_case() -> None:
    report = look(None)
    assert [driver.found for driver in report.drivers] == [False, False]
    assert report.problems == () and report.auto_device == "cpu"
    assert last_line(report) == "--device auto: cpu, because no GPU driver library was found"


def test_a_driver_without_a_torch_for_it_is_explained(gpu: FakeGpu) -> None:
    report = look(gpu, sees=False)
    assert report.problems == ()
    assert f"PyTorch {torch.__version__} sees no GPU; install" in last_line(report)


def test_an_auto_that_fails_is_broken(gpu: FakeGpu) -> None:
    def auto() -> str:
        raise ConfigError("nothing to run on")

    report = look(gpu, auto=auto)
    assert report.problems == ("--device auto fails: nothing to run on",)
    assert report.auto_device == "none"


def test_the_machine_as_a_tree_of_files_says_it(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 8000000 kB\nMemAvailable: 6000000 kB\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Fast 1\nmodel name\t: Fast 2\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/limits": "Max locked memory         65536    65536    bytes\n",
        "sys/fs/cgroup/memory.max": "3000000000\n",
        "sys/fs/cgroup/memory.current": "1000000000\n",
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for node in range(2):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    report = examine(Sources(root=tmp_path, libraries={}, gpus=tuple), read_gbps=12.345)
    assert report.cpu.model == "Fast 1" and report.cpu.numa_nodes == 2
    assert report.cpu.isa == report.cpu.detected[-1]
    assert 1 <= report.cpu.threads <= report.cpu.logical_cpus
    memory = report.memory
    assert (memory.total_bytes, memory.available_bytes) == (8_192_000_000, 6_144_000_000)
    assert memory.is_limited and memory.usable_bytes == memory.pinnable_bytes == 2_000_000_000
    text = "\n".join(command.lines(report))
    for said in (
        "5.72 GiB of 7.63 GiB available, a control group leaves 1.86 GiB",
        "limit on locked memory 0.1 MiB (ulimit -l)",
        "reads     12.35 GB/s",
        "2 NUMA nodes",
    ):
        assert said in text


@pytest.mark.parametrize("hip", [None, "7.1.0"])
def test_gpus_as_torch_describes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hip: str | None
) -> None:
    properties = SimpleNamespace(
        name="Card", major=12, minor=0, gcnArchName="gfx1100:sramecc-:xnack-"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 + index, 100))
    monkeypatch.setattr(torch.version, "hip", hip)
    assert [gpu.driver for gpu in torch_gpus(tmp_path)] == ["", ""]
    nvidia = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\nGCC version: 12.2\n"
    for name, text in (
        ("proc/driver/nvidia/version", nvidia),
        ("sys/module/amdgpu/version", "6.10.5\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    first, second = torch_gpus(tmp_path)
    named = ("cuda", "sm_120", "550.54.15") if hip is None else ("rocm", "gfx1100", "6.10.5")
    assert (first.vendor, first.architecture, first.driver) == named
    assert (first.free_bytes, second.free_bytes, second.total_bytes) == (10, 11, 100)


def test_a_gpu_that_torch_fails_to_look_at_is_a_problem(gpu: FakeGpu) -> None:
    """A device that is lost, or full: torch raises RuntimeError, or a subclass, at any call."""

    def lost() -> tuple[GpuReport, ...]:
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    def fails() -> str:
        raise RuntimeError("CUDA error: unspecified launch failure")

    sources = Sources(libraries={vendor_of(gpu): gpu.path}, gpus=lost, auto_device=fails)
    report = examine(sources)
    assert report.gpus == ()
    assert report.auto_device == "none"
    assert report.problems == (
        "PyTorch fails to look at the GPUs: CUDA error: out of memory",
        "--device auto fails: CUDA error: unspecified launch failure",
    )
    assert driver_of(report).found  # the rest is looked at all the same
    assert "out of memory" in last_line(report)


@pytest.fixture
def ft(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run `ft doctor` on what a test says is there."""

    def run(report: Report, *arguments: str) -> Result:
        monkeypatch.setattr(command, "examine", lambda read_gbps=None: report)
        return CliRunner().invoke(app, ["doctor", *arguments])

    return run


def test_the_exit_status_says_whether_something_is_broken(
    ft: Callable[..., Result], gpu: FakeGpu
) -> None:
    healthy = look(gpu)
    for report, status in ((healthy, 0), (replace(healthy, problems=("lost",)), 1)):
        for arguments in ((), ("--json",)):
            run = ft(report, *arguments)
            assert run.exit_code == status, run.output
            assert "Traceback" not in run.output


def test_json_has_everything(ft: Callable[..., Result], gpu: FakeGpu) -> None:
    found = json.loads(ft(look(gpu), "--json").stdout)
    assert found.keys() == {
        "software", "cpu", "memory", "gpus", "drivers", "auto_device", "auto_reason", "problems",
    }  # fmt: skip
    assert found["software"]["torch"] == torch.__version__
    assert found["gpus"][0]["name"] == "Fake 9000"
    (driver,) = found["drivers"]
    assert driver["vendor"] == vendor_of(gpu) and driver["graphs_safe"] is True
    assert [m["used"] for m in driver["mechanisms"]] == [True, False, False]
    assert all(
        m.keys() == {"name", "eager", "graph", "used", "reason"} for m in driver["mechanisms"]
    )
    assert found["cpu"]["read_gbps"] is None


def test_on_this_machine() -> None:
    run = CliRunner().invoke(app, ["doctor"])
    assert run.exit_code == 0, run.output
    assert run.stdout.splitlines()[-1].startswith("--device auto: ")
