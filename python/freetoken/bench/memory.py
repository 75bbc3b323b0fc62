"""The machine's read bandwidth, with the engine's own worker pool."""

from __future__ import annotations

import mmap
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from freetoken.checkpoints.mapping import ask_for_huge_pages
from freetoken.engine.hardware import detect_hardware
from freetoken.errors import CapacityError
from freetoken.kernels.cpu import CpuOps

Bytes = npt.NDArray[np.uint8]

_FALLBACK_CACHE_BYTES = 32 << 20  # where the system does not say
_POOL_CACHES = 8  # times the last-level cache, so that nothing is found there again
_LEAST_POOL_BYTES = 512 << 20
_PASSES = 15


@dataclass(frozen=True)
class MemoryResult:
    """`read_gbps`: median over passes of buffer_bytes / seconds, in units of 10^9 bytes/s."""

    read_gbps: float
    best_gbps: float
    threads: int
    buffer_bytes: int
    passes: int


def measure_memory(threads: int | None = None) -> MemoryResult:
    """Read a buffer much larger than the last-level cache, several times, with all threads."""
    ops = CpuOps(threads)
    try:
        buffer = huge_buffer(pool_bytes())
        buffer[:] = 1  # pages that were never written would all be one page of zeros
        read_gbps(ops, buffer)
        passes = [read_gbps(ops, buffer) for _ in range(_PASSES)]
        return MemoryResult(
            read_gbps=statistics.median(passes),
            best_gbps=max(passes),
            threads=ops.threads,
            buffer_bytes=buffer.nbytes,
            passes=_PASSES,
        )
    finally:
        ops.close()


def read_gbps(ops: CpuOps, data: Bytes) -> float:
    """The bandwidth of one pass over `data`."""
    start = time.perf_counter()
    ops.read_bytes(data)
    return data.nbytes / (time.perf_counter() - start) * 1e-9


def pool_bytes() -> int:
    """Bytes so many that reading them once leaves nothing of their beginning in a cache."""
    return max(_LEAST_POOL_BYTES, _POOL_CACHES * last_level_cache_bytes())


def last_level_cache_bytes(root: Path = Path("/")) -> int:
    """The largest cache of the first CPU, as the kernel describes it."""
    sizes = [_bytes_of(file.read_text()) for file in _cache_files(root)]
    return max(sizes, default=_FALLBACK_CACHE_BYTES)


def _cache_files(root: Path) -> list[Path]:
    return sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"))


def _bytes_of(text: str) -> int:
    """ "32768K" and the like."""
    number, unit = text.strip()[:-1], text.strip()[-1]
    return int(number) << {"K": 10, "M": 20, "G": 30}[unit]


def huge_buffer(size_bytes: int, beside_bytes: int = 0, ask_less: str = "") -> Bytes:
    """Zeroed private memory, on huge pages if the system grants them: with pages of 4 KiB the
    translation of addresses costs a tenth of the bandwidth. Raises CapacityError if the system
    refuses, or has not so much and `beside_bytes`, which the caller will take, free; its way out
    ends with `ask_less`, what the caller's options allow."""
    available_bytes = detect_hardware().memory_bytes
    if size_bytes + beside_bytes > available_bytes:
        raise CapacityError(
            f"the benchmark needs {(size_bytes + beside_bytes) / 2**30:.1f} GiB of memory and "
            f"{available_bytes / 2**30:.1f} GiB are free: end other programs{ask_less}"
        )
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(
            f"the benchmark needs {size_bytes / 2**30:.1f} GiB of memory, which the system "
            f"refuses: {error.strerror}; look at the limits of this process (ulimit -v)"
        ) from error
    ask_for_huge_pages(memory)
    return np.frombuffer(memory, np.uint8)
