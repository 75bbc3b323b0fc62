"""Reading how much memory there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.engine.hardware import detect_hardware
from freetoken.errors import FreeTokenError


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:    4000 kB\n"}
V2 = {
    "sys/fs/cgroup/memory.max": "3000000\n",
    "sys/fs/cgroup/memory.current": "1000000\n",
    "sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 200000\n",
}
V1 = {
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
    "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 300000\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4_096_000),
        (V2, 2_200_000),
        (V1, 2_300_000),
        ({**V2, "sys/fs/cgroup/memory.max": "max\n"}, 4_096_000),
        ({**V2, "sys/fs/cgroup/memory.max": "90000000\n"}, 4_096_000),
    ],
)
def test_the_smaller_of_machine_and_group(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert detect_hardware(write(tmp_path, {**MEMINFO, **files})).memory_bytes == expected


def test_this_machine() -> None:
    assert detect_hardware().memory_bytes > 0


def test_an_unknown_meminfo_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FreeTokenError, match="MemAvailable"):
        detect_hardware(write(tmp_path, {"proc/meminfo": "MemTotal: 1 kB\n"}))
