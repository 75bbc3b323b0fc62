"""The caches, on host and device: ids in place, copies, failed copies, counts, contents."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from freetoken.errors import CapacityError
from freetoken.moe.device_cache import DeviceMoeCache
from freetoken.moe.lru import FetchCap
from freetoken.moe.offload_cache import OffloadMoeCache
from freetoken.moe.stats import DeviceExpertCounter, ExpertCounter
from freetoken.moe.store import PackedExpertStore, SlotPool
from freetoken.telemetry import ExpertCounts
from support.moe_fakes import DeviceMemory, HostMemory, random_layer

LAYERS = [random_layer(0, 6), random_layer(1, 6)]


class FlakyPool(SlotPool):
    """Fails at the copy number `fail_at`, halfway through it; -1: never."""

    fail_at = -1

    def fill(self, layer_id: int, slot: int, record: torch.Tensor) -> None:
        if self.fail_at == 0:
            self.fail_at = -1
            half = len(record) // 2
            self._records[layer_id][slot][:half] = record[:half]
            raise OSError("the copy failed")
        self.fail_at -= self.fail_at > 0
        super().fill(layer_id, slot, record)


def make_cache(slots: int, max_fetch: int | None = None) -> tuple[OffloadMoeCache, FlakyPool]:
    pool = FlakyPool(HostMemory(), LAYERS, slots)
    cache = OffloadMoeCache(
        PackedExpertStore(LAYERS, HostMemory()), pool, FetchCap.fixed(max_fetch), ExpertCounter(2)
    )
    return cache, pool


def make_device_cache(slots: int, max_fetch: int | None = None) -> tuple[DeviceMoeCache, SlotPool]:
    memory = DeviceMemory()
    pool = SlotPool(memory, LAYERS, slots)
    store = PackedExpertStore(LAYERS, memory, pinned=True)
    counter = DeviceExpertCounter(2, memory.device)
    return DeviceMoeCache(store, pool, FetchCap.fixed(max_fetch), counter), pool


def ids_of(*rows: list[int], device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device)


Make = Callable[..., tuple[Any, SlotPool]]
both = pytest.mark.parametrize(
    ("make", "device"),
    [
        pytest.param(make_cache, "cpu", id="host"),
        pytest.param(make_device_cache, DeviceMemory.device, id="device"),
    ],
)


@both
def test_ids_become_slots_in_place_and_copies_follow(make: Make, device: torch.device) -> None:
    cache, pool = make(slots=3)
    ids = ids_of([4, 2], [2, 5], device=device)
    cache.ensure_experts_hybrid(1, ids)
    assert ids.tolist() == [[1, 0], [0, 2]]
    assert not pool.record(1, 0).any()  # nothing is copied before copy_missing
    cache.check_integrity(contents=True)
    cache.copy_missing()
    cache.check_integrity(contents=True)
    assert cache.resident(1) == {2: 0, 4: 1, 5: 2}
    assert cache.resident(0) == {}
    assert pool.record(1, 0).any()


@both
def test_the_cap_leaves_routes_to_the_cpu_and_can_change(make: Make, device: torch.device) -> None:
    cache, _ = make(slots=3, max_fetch=1)
    ids = ids_of([4, 2], device=device)
    cache.ensure_experts_hybrid(0, ids)
    cache.copy_missing()
    assert ids.tolist() == [[-1, 0]]
    cache.cap.set(0)
    ids = ids_of([4, 2], device=device)
    cache.ensure_experts_hybrid(0, ids)
    assert ids.tolist() == [[-1, 0]]


@both
def test_ensure_experts_fetches_every_miss_whatever_the_cap(
    make: Make, device: torch.device
) -> None:
    cache, _ = make(slots=3, max_fetch=0)
    ids = ids_of([4, 2], [-1, -1], device=device)
    cache.ensure_experts(0, ids)
    assert ids.tolist() == [[1, 0], [-1, -1]]
    with pytest.raises(CapacityError, match="4 experts"):
        cache.ensure_experts(0, ids_of([0, 1], [2, 3], device=device))


@both
def test_counts_of_steps_and_of_waves(make: Make, device: torch.device) -> None:
    cache, _ = make(slots=2, max_fetch=1)
    for row in ([0, 1], [0, 3]):
        cache.ensure_experts_hybrid(0, ids_of(row, row, device=device))
        cache.record_stats(0)
        cache.copy_missing()
    assert cache.stats() == (
        ExpertCounts(steps=2, active=4, hits=1, misses=3, fetched=2, cpu=1),
        ExpertCounts(),
    )
    other = (
        ExpertCounter(2) if isinstance(cache, OffloadMoeCache) else DeviceExpertCounter(2, device)
    )
    cache.record_into(other, 0, steps=0)
    assert other.layers()[0] == ExpertCounts(steps=0, active=2, hits=1, misses=1, fetched=1, cpu=0)


@pytest.mark.parametrize(("fail_at", "left"), [(0, {}), (1, {2: 0}), (2, {2: 0, 4: 1})])
def test_a_failed_copy_leaves_its_slot_and_the_later_ones_empty(
    fail_at: int, left: dict[int, int]
) -> None:
    cache, pool = make_cache(slots=3)
    cache.ensure_experts_hybrid(0, ids_of([5, 2, 4]))
    pool.fail_at = fail_at
    with pytest.raises(OSError, match="the copy failed"):
        cache.copy_missing()
    assert cache.resident(0) == left
    assert not pool.record(0, fail_at).any()  # no half a record that 0 * slot could stumble over
    cache.check_integrity(contents=True)
    ids = ids_of([5, 2, 4])
    cache.ensure_experts_hybrid(0, ids)
    cache.copy_missing()
    assert sorted(cache.resident(0)) == [2, 4, 5]
    cache.check_integrity(contents=True)


@both
def test_a_step_that_ended_before_its_copies_is_undone_by_the_next(
    make: Make, device: torch.device
) -> None:
    cache, _ = make(slots=2)
    cache.ensure_experts_hybrid(0, ids_of([3, 1], device=device))
    ids = ids_of([3], device=device)
    cache.ensure_experts_hybrid(1, ids)  # another layer: layer 0 was never copied
    cache.copy_missing()
    assert cache.resident(0) == {}
    assert cache.resident(1) == {3: 0}
    cache.check_integrity(contents=True)


@both
def test_contents_check_finds_a_foreign_record(make: Make, device: torch.device) -> None:
    cache, pool = make(slots=2)
    cache.ensure_experts_hybrid(1, ids_of([3], device=device))
    cache.copy_missing()
    pool.clear(1, 0)
    with pytest.raises(RuntimeError, match="MoE layer 1: slot 0 does not hold expert 3"):
        cache.check_integrity(contents=True)


class CacheMachine(RuleBasedStateMachine):
    """Steps of all kinds, failing ones among them, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.pool = make_cache(slots=3)

    @rule(
        layer_id=st.integers(0, 1),
        ids=st.lists(st.lists(st.integers(-1, 5), min_size=2, max_size=2), min_size=1, max_size=3),
        cap=st.integers(0, 4),
        fail_at=st.integers(-1, 3),
        copies=st.booleans(),
    )
    def hybrid_step(
        self, layer_id: int, ids: list[list[int]], cap: int, fail_at: int, copies: bool
    ) -> None:
        self.cache.cap.value[...] = cap
        tensor = ids_of(*ids)
        self.cache.ensure_experts_hybrid(layer_id, tensor)
        self.pool.fail_at = fail_at
        if copies:
            try:
                self.cache.copy_missing()
            except OSError:
                return
            resident = self.cache.resident(layer_id)
            for raw, slot in zip(chain.from_iterable(ids), tensor.flatten().tolist(), strict=True):
                assert slot == resident.get(raw, -1)

    @rule(layer_id=st.integers(0, 1), ids=st.lists(st.integers(-1, 5), min_size=1, max_size=3))
    def offload_step(self, layer_id: int, ids: list[int]) -> None:
        tensor = ids_of(ids)
        self.pool.fail_at = -1
        self.cache.ensure_experts(layer_id, tensor)
        self.cache.copy_missing()
        resident = self.cache.resident(layer_id)
        assert tensor.tolist() == [[resident[e] if e >= 0 else -1 for e in ids]]

    @invariant()
    def intact(self) -> None:
        self.cache.check_integrity(contents=True)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
