"""Reading how much memory there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freetoken.engine.hardware import detect_hardware
from freetoken.errors import FreeTokenError

Files = dict[str, str]


def write(root: Path, files: Files) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:    4000 kB\n"}


def group_v2(path: str, limit: str, used: int = 1_000_000, inactive: int = 200_000) -> Files:
    group = f"sys/fs/cgroup/{path}"
    return {
        f"{group}/memory.max": f"{limit}\n",
        f"{group}/memory.current": f"{used}\n",
        f"{group}/memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def group_v1(path: str, limit: int, used: int = 1_000_000, inactive: int = 300_000) -> Files:
    group = f"sys/fs/cgroup/{path}"
    return {
        f"{group}/memory.limit_in_bytes": f"{limit}\n",
        f"{group}/memory.usage_in_bytes": f"{used}\n",
        f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


def of_process(*lines: str) -> Files:
    return {"proc/self/cgroup": "".join(f"{line}\n" for line in lines)}


V2 = of_process("0::/user.slice/job.scope")
V1 = of_process("12:cpu,cpuacct:/a", "4:memory:/slurm/job", "0::/")
NO_LIMIT_V1 = 2**63 - 4096


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4_096_000),
        # Version 2: the own group, one above it, the mount; the smallest counts.
        (V2 | group_v2("user.slice/job.scope", "3000000"), 2_200_000),
        (
            V2 | group_v2("user.slice/job.scope", "max") | group_v2("user.slice", "3000000"),
            2_200_000,
        ),
        (V2 | group_v2("", "3000000"), 2_200_000),
        (
            V2 | group_v2("user.slice/job.scope", "3000000") | group_v2("user.slice", "2500000"),
            1_700_000,
        ),
        (
            V2 | group_v2("user.slice/job.scope", "2500000") | group_v2("user.slice", "3000000"),
            1_700_000,
        ),
        (V2 | group_v2("user.slice/job.scope", "90000000"), 4_096_000),
        (V2 | group_v2("user.slice/job.scope", "500000"), 0),
        (V2 | group_v2("other", "3000000"), 4_096_000),
        (of_process("0::/") | group_v2("", "3000000"), 2_200_000),
        (of_process("0::/../../host/job") | group_v2("", "3000000"), 2_200_000),
        # Version 1: the memory controller's line, alone or mounted with others.
        (V1 | group_v1("memory/slurm/job", 3_000_000), 2_300_000),
        (
            V1 | group_v1("memory/slurm/job", NO_LIMIT_V1) | group_v1("memory/slurm", 3_000_000),
            2_300_000,
        ),
        (V1 | group_v1("memory", 3_000_000), 2_300_000),
        (V1 | group_v1("memory/a", 3_000_000), 4_096_000),
        (
            of_process("4:cpu,memory:/job") | group_v1("cpu,memory/job", 3_000_000),
            2_300_000,
        ),
    ],
)
def test_the_smallest_of_machine_and_groups(tmp_path: Path, files: Files, expected: int) -> None:
    assert detect_hardware(write(tmp_path, MEMINFO | files)).memory_bytes == expected


def limits(soft: str, capabilities: str = "0000000000000000") -> Files:
    return {
        "proc/self/limits": "Limit                     Soft Limit           Hard Limit    Units\n"
        f"Max stack size            8388608              unlimited     bytes\n"
        f"Max locked memory         {soft:20} unlimited     bytes\n",
        "proc/self/status": f"Name:\tpython\nCapInh:\t{2**14:016x}\nCapEff:\t{capabilities}\n",
    }


WSL = {"proc/sys/kernel/osrelease": "5.15.90.1-microsoft-standard-WSL2\n"}
FREE = {"proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:    8900 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 4000 * 1024),  # all that is available
        (FREE, 7200 * 1024),  # most of what there is
        (FREE | {"proc/sys/kernel/osrelease": "6.1.0-amd64\n"}, 7200 * 1024),
        (FREE | WSL, 4500 * 1024),
        (FREE | V2 | group_v2("user.slice", "3000000"), 2_200_000),
        # A limit on locked memory is no limit for the drivers that know no such thing.
        (FREE | limits("65536"), 7200 * 1024),
    ],
)
def test_what_may_be_pinned(tmp_path: Path, files: Files, expected: int) -> None:
    assert detect_hardware(write(tmp_path, files)).pinnable_bytes == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (limits("65536"), 65536),
        (limits("unlimited"), None),
        (limits("65536", f"{1 << 14:016x}"), None),  # CAP_IPC_LOCK
        (limits("65536", "000001ffffffffff"), None),
        (limits("65536", f"{1 << 13 | 1 << 15:016x}"), 65536),
    ],
)
def test_the_limit_on_locked_memory(tmp_path: Path, files: Files, expected: int | None) -> None:
    assert detect_hardware(write(tmp_path, MEMINFO | files)).memlock_bytes == expected


def test_the_gpus_memory_is_asked_for_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 700, 1000

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("emptied"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    found = detect_hardware(gpu=torch.device("cuda:1"))
    assert found.gpu_bytes == 700
    assert asked == ["emptied", torch.device("cuda:1")]  # in this order


def test_this_machine() -> None:
    found = detect_hardware()
    assert found.memory_bytes > 0 and found.gpu_bytes is None
    assert found.pinnable_bytes is not None and 0 < found.pinnable_bytes <= found.memory_bytes


def test_an_unknown_meminfo_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FreeTokenError, match="MemAvailable"):
        detect_hardware(write(tmp_path, {"proc/meminfo": "MemTotal: 1 kB\n"}))
