"""Reading how much memory there is."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_this_machine() -> None:
    assert detect_hardware().memory_bytes > 0


def test_an_unknown_meminfo_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FreeTokenError, match="MemAvailable"):
        detect_hardware(write(tmp_path, {"proc/meminfo": "MemTotal: 1 kB\n"}))
