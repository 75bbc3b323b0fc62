"""What a table of figures has to say about the machine they come from."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freetoken import __version__
from freetoken.bench.memory import last_level_cache_bytes


def describe() -> dict[str, Any]:
    """Date (UTC), processor, cores that this process may use, memory, versions."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache_mib": last_level_cache_bytes() >> 20,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
        "freetoken": __version__,
    }


def describe_line(machine: dict[str, Any]) -> str:
    return (
        f"{machine['date']}; {machine['cpu']}, {machine['cores']} cores, last-level cache "
        f"{machine['last_level_cache_mib']} MiB, {machine['memory_gib']} GiB; "
        f"load average at the start {machine['load_average']:.2f}"
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The first column to the left, the others to the right."""
    lines = [
        "| " + " | ".join(header) + " |",
        "|" + "|".join(["---", *["---:"] * (len(header) - 1)]) + "|",
    ]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def write_json(path: Path | None, value: object) -> None:
    if path is not None:
        path.write_text(json.dumps(value, indent=1) + "\n")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()
