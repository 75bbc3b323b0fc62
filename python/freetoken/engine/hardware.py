"""How much memory this process can still have."""

from __future__ import annotations

from pathlib import Path

from freetoken.config import Hardware
from freetoken.errors import FreeTokenError

_KIB = 1024


def detect_hardware(root: Path = Path("/")) -> Hardware:
    """Memory available now: what the kernel says, and the control group's limit if lower."""
    available = _memory_available(root / "proc/meminfo")
    room = _cgroup_room(root / "sys/fs/cgroup")
    return Hardware(memory_bytes=available if room is None else min(available, room))


def _memory_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * _KIB
    raise FreeTokenError(
        f"{meminfo} has no MemAvailable line, which Linux 3.14 and later write; "
        "run on a Linux system with /proc mounted"
    )


def _cgroup_room(group: Path) -> int | None:
    """Bytes below the memory limit of a version 2 or 1 control group; None without a limit.

    Page cache that the kernel can drop counts as used there; it is given back as `inactive_file`.
    """
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit_file, used_file = group / limit_name, group / used_name
        if limit_file.exists() and used_file.exists():
            limit = limit_file.read_text().strip()
            if limit == "max":
                return None
            stat = (limit_file.parent / "memory.stat").read_text()
            return max(0, int(limit) - int(used_file.read_text()) + _inactive_file(stat))
    return None


def _inactive_file(stat: str) -> int:
    fields = dict(line.split() for line in stat.splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))
