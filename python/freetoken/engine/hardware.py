"""How much memory this process can still have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

from freetoken.config import Hardware
from freetoken.errors import FreeTokenError
from freetoken.platforms import gpu_memory

_KIB = 1024
# Of all memory, what may be pinned: pages that cannot be moved or swapped are missed elsewhere.
_PINNABLE_SHARE = 0.8
# Windows gives the GPU driver under WSL no more.
_PINNABLE_SHARE_WSL = 0.5
_CAP_IPC_LOCK = 1 << 14


def detect_hardware(root: Path = Path("/"), gpu: torch.device | None = None) -> Hardware:
    """Memory available now: what the kernel says, and what the process's control groups leave if
    that is less. `gpu`: the one that will be used, whose free memory is asked for."""
    meminfo = read_meminfo(root)
    rooms = [meminfo["MemAvailable"], *_cgroup_rooms(root)]
    share = _PINNABLE_SHARE_WSL if _is_wsl(root) else _PINNABLE_SHARE
    return Hardware(
        memory_bytes=min(rooms),
        gpu_bytes=None if gpu is None else gpu_memory.free_bytes(gpu),
        pinnable_bytes=min(int(meminfo.get("MemTotal", 0) * share), *rooms),
        memlock_bytes=_memlock(root / "proc/self"),
    )


def read_meminfo(root: Path = Path("/")) -> dict[str, int]:
    """What the kernel says of the machine's memory, in bytes by name; MemAvailable is there."""
    file = root / "proc/meminfo"
    found = {}
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            found[name] = int(value.split()[0]) * _KIB
    if "MemAvailable" in found:
        return found
    raise FreeTokenError(
        f"{file} has no MemAvailable line, which Linux 3.14 and later write; "
        "run on a Linux system with /proc mounted"
    )


def _is_wsl(root: Path) -> bool:
    release = root / "proc/sys/kernel/osrelease"
    return release.exists() and "microsoft" in release.read_text().lower()


def _memlock(process: Path) -> int | None:
    """The soft limit on locked memory in bytes; None where there is none, or the process may
    exceed it (CAP_IPC_LOCK)."""
    for line in _lines(process / "status"):
        name, _, value = line.partition(":")
        if name == "CapEff" and int(value, 16) & _CAP_IPC_LOCK:
            return None
    for line in _lines(process / "limits"):
        if line.startswith("Max locked memory"):
            soft = line.split()[3]
            return None if soft == "unlimited" else int(soft)
    return None


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """What is left below every limit that the process's groups and their ancestors have, in bytes.

    A line of /proc/self/cgroup is hierarchy:controllers:path; version 2 names no controllers.
    """
    file = root / "proc/self/cgroup"
    mounts = root / "sys/fs/cgroup"
    for line in _lines(file):
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
