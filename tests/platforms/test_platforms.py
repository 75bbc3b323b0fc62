from __future__ import annotations

import numpy as np
import pytest

from freetoken.errors import CapacityError, ConfigError
from freetoken.platforms import CpuPlatform, select_platform


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_cpu_is_chosen(device: str) -> None:
    platform = select_platform(device, 2)
    assert platform.device == "cpu"
    assert platform.ops is platform.ops and platform.ops.threads == 2
    assert platform.description == f"CPU, 2 threads, {platform.ops.description}"
    platform.close()


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="no GPU kernels yet; use --device cpu"):
        select_platform("cuda")
    with pytest.raises(ConfigError, match="found 'tpu', expected auto, cpu or cuda"):
        select_platform("tpu")


@pytest.mark.parametrize("size_bytes", [1, 255, 4096, 100_001])
def test_memory_is_aligned_zeroed_and_writable(size_bytes: int) -> None:
    platform = CpuPlatform(1)
    memory = platform.allocate(size_bytes)
    assert memory.shape == (size_bytes,) and memory.dtype == np.uint8
    assert memory.ctypes.data % 256 == 0 and not memory.any()
    memory[:] = 1
    platform.close()


def test_too_much_memory_is_a_capacity_error() -> None:
    platform = CpuPlatform(1)
    with pytest.raises(CapacityError, match=r"GiB of host memory .*--cache-slots"):
        platform.allocate(1 << 60)
    platform.close()
