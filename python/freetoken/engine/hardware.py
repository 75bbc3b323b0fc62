"""How much memory this process can still have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from freetoken.config import Hardware
from freetoken.errors import FreeTokenError

_KIB = 1024


def detect_hardware(root: Path = Path("/")) -> Hardware:
    """Memory available now: what the kernel says, and what the process's control groups leave if
    that is less."""
    rooms = [_memory_available(root / "proc/meminfo"), *_cgroup_rooms(root)]
    return Hardware(memory_bytes=min(rooms))


def _memory_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * _KIB
    raise FreeTokenError(
        f"{meminfo} has no MemAvailable line, which Linux 3.14 and later write; "
        "run on a Linux system with /proc mounted"
    )


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """What is left below every limit that the process's groups and their ancestors have, in bytes.

    A line of /proc/self/cgroup is hierarchy:controllers:path; version 2 names no controllers.
    """
    file = root / "proc/self/cgroup"
    mounts = root / "sys/fs/cgroup"
    for line in file.read_text().splitlines() if file.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for group in _with_ancestors(mounts, path):
                yield from _room(group, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            for mount in {controllers, "memory"}:
                for group in _with_ancestors(mounts / mount, path):
                    yield from _room(group, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _with_ancestors(mount: Path, path: str) -> list[Path]:
    """The group at `path` below a mount and all above it, up to the mount. Inside a container the
    path may name directories that only the host has; then the mount is the container's group."""
    relative = PurePosixPath(path.lstrip("/"))
    if ".." in relative.parts:  # outside of the group that the process sees as the root
        return [mount]
    return [mount / relative, *(mount / parent for parent in relative.parents)]


def _room(group: Path, limit_name: str, used_name: str) -> Iterator[int]:
    """Bytes below the group's limit, if it has one.

    Page cache that the kernel can drop counts as used there; it is given back as `inactive_file`.
    """
    limit_file = group / limit_name
    if not limit_file.exists():
        return
    limit = limit_file.read_text().strip()
    if limit != "max":
        used = int((group / used_name).read_text())
        yield max(0, int(limit) - used + _inactive_file((group / "memory.stat").read_text()))


def _inactive_file(stat: str) -> int:
    fields = dict(line.split() for line in stat.splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))
