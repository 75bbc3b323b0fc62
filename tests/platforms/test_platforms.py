from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from freetoken import _native
from freetoken.errors import CapacityError, ConfigError
from freetoken.formats import FORMATS
from freetoken.moe.store import MappedExpertStore
from freetoken.platforms import CpuPlatform, select_platform
from support.moe_fakes import random_layer


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_cpu_is_chosen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    platform = select_platform(device, 2)
    assert platform.device == "cpu"
    assert platform.ops is platform.ops and platform.ops.threads == 2
    assert platform.description == f"CPU, 2 threads, {platform.ops.description}"
    platform.close()


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "rocm"):
        with pytest.raises(ConfigError, match=f"{device}.*see what `ft doctor` says"):
            select_platform(device)
    with pytest.raises(ConfigError, match="found 'tpu', expected one of auto, cpu, cuda, rocm"):
        select_platform("tpu")


def test_a_vendor_that_torch_is_not_built_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match="'rocm': this torch is built for cuda"):
        select_platform("rocm")


@pytest.mark.parametrize("size_bytes", [1, 255, 4096, 100_001])
def test_memory_is_aligned_zeroed_and_writable(size_bytes: int) -> None:
    platform = CpuPlatform(1)
    memory = platform.allocate(size_bytes)
    assert memory.shape == (size_bytes,) and memory.dtype == np.uint8
    assert memory.ctypes.data % 256 == 0 and not memory.any()
    memory[:] = 1
    platform.close()


class FakedNodes:
    """A context whose threads claim to be on these nodes; it remembers what it was to place."""

    def __init__(self, context: _native.Context, nodes: list[int]) -> None:
        self._context = context
        self.nodes = nodes
        self.placed: list[tuple[int, bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def place(self, bank: _native.ExpertBank, mapped: bool) -> None:
        self._context.place(bank, mapped)
        self.placed.append((bank.experts, mapped))


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(("nodes", "times"), [([0, 0], 0), ([3, 3], 0), ([0, 2], 1)])
def test_experts_are_placed_where_there_are_several_nodes(
    nodes: list[int], times: int, mapped: bool
) -> None:
    platform = CpuPlatform(2)
    faked = FakedNodes(platform.ops._context, nodes)
    platform.ops._context = faked  # type: ignore[assignment]
    layer = random_layer(0, 3, formats=[FORMATS["F32"]] * 3)
    before = [expert.copy() for expert in layer.gate.experts]
    platform.place(MappedExpertStore([layer]).bank(0), mapped=mapped)
    assert faked.placed == [(3, mapped)] * times
    assert platform.ops.nodes == times + 1
    np.testing.assert_equal(list(layer.gate.experts), before)
    platform.close()


def test_too_much_memory_is_a_capacity_error() -> None:
    platform = CpuPlatform(1)
    with pytest.raises(CapacityError, match=r"GiB of host memory for .*all .*; free some memory"):
        platform.allocate(1 << 60)
    platform.close()


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (3, 3), (4, 3), (6, 5)])
def test_beside_a_gpu_one_of_four_cores_is_left_to_what_answers_it(
    cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from freetoken.platforms import gpu

    made: list[int] = []
    monkeypatch.setattr(_native, "physical_cpus", lambda: list(range(cores)))
    monkeypatch.setattr(gpu, "CpuOps", lambda threads, activations: made.append(threads))
    gpu.GpuPlatform(torch.device("cpu"))
    gpu.GpuPlatform(torch.device("cpu"), 9)
    assert made == [expected, 9], "one pool each, and what was asked for stays"
