"""The cache on a device against the one on the host, call by call, and what only it can do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from freetoken.errors import CapacityError, ConfigError
from freetoken.kernels.triton.lru import LruState
from freetoken.moe import device_cache
from freetoken.moe.cpu_executor import CpuMoeExecutor
from freetoken.moe.device_cache import DeviceMoeCache, read_back
from freetoken.moe.hybrid_decode import HybridDecodeExecutor, HybridDecodeRequest
from freetoken.moe.lru import FetchCap
from freetoken.moe.offload_cache import OffloadMoeCache
from freetoken.moe.stats import DeviceExpertCounter, ExpertCounter
from freetoken.moe.store import PackedExpertStore, SlotPool
from support.host_reads import HostReads
from support.moe_fakes import DeviceMemory, HostMemory, OrderedKernel, random_layer, random_routes

LAYERS = [random_layer(0, 6), random_layer(1, 9)]
DEVICE = DeviceMemory.device

needs_host_addresses = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="the reference kernel reads slots at host addresses"
)


def on_device(slots: int, cap: FetchCap | None = None) -> tuple[DeviceMoeCache, SlotPool]:
    memory = DeviceMemory()
    pool = SlotPool(memory, LAYERS, slots)
    store = PackedExpertStore(LAYERS, memory, pinned=True)
    counter = DeviceExpertCounter(len(LAYERS), DEVICE)
    return DeviceMoeCache(store, pool, cap or FetchCap.fixed(None), counter), pool


def on_host(slots: int, cap: FetchCap | None = None) -> tuple[OffloadMoeCache, SlotPool]:
    pool = SlotPool(HostMemory(), LAYERS, slots)
    store = PackedExpertStore(LAYERS, HostMemory())
    counter = ExpertCounter(len(LAYERS))
    return OffloadMoeCache(store, pool, cap or FetchCap.fixed(None), counter), pool


def ids_of(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


class Lockstep:
    """Both caches, given the same calls; after each they must agree in all that can be seen."""

    def __init__(self, slots: int, *, is_fraction: bool) -> None:
        def cap() -> FetchCap:
            return FetchCap.fraction(0.5) if is_fraction else FetchCap.fixed(2)

        self.is_fraction = is_fraction
        self.host, self.host_pool = on_host(slots, cap())
        self.device, self.device_pool = on_device(slots, cap())

    def step(self, rng: np.random.Generator, tokens: int) -> None:
        layer_id = int(rng.integers(2))
        experts = LAYERS[layer_id].experts
        _, ids = random_routes(rng, tokens, experts, 2)
        ids[torch.from_numpy(rng.random(tokens) < 0.2)] = -1
        units = int(rng.integers(0, (1 << 16) + 1 if self.is_fraction else 4))
        fits = len(set(ids.flatten().tolist()) - {-1}) <= self.host.slots
        uncapped, counts, copies = fits and rng.random() < 0.3, rng.random() < 0.7, rng.random()
        seen = []
        for cache, given_ids in ((self.host, ids.clone()), (self.device, ids.to(DEVICE))):
            cache.cap.set(units)
            if uncapped:
                cache.ensure_experts(layer_id, given_ids)
            else:
                cache.ensure_experts_hybrid(layer_id, given_ids)
            if counts:
                cache.record_stats(layer_id)
            if copies < 0.75:
                cache.copy_missing()
            if copies < 0.1:
                cache.copy_missing()  # a second time there is nothing to do
            if counts and copies > 0.6:  # also after the copies, or without them
                cache.record_into(cache.counter, layer_id, steps=0)
            seen.append(given_ids.tolist())
            cache.check_integrity(contents=True)
        assert seen[0] == seen[1]
        self.compare(layer_id)

    def compare(self, layer_id: int) -> None:
        assert self.host.stats() == self.device.stats()
        for layer in range(2):
            assert self.host.resident(layer) == self.device.resident(layer)
        lru, found = self.host._lrus[layer_id], read_back(self.device.state(layer_id))
        assert lru.step == found.step
        for name in ("slot_of", "last_active", "expert_in", "last_used"):
            assert getattr(lru, name).tolist() == getattr(found, name).tolist(), name
        host, device = self.host_pool.records(layer_id), self.device_pool.records(layer_id)
        assert torch.equal(host, device.cpu())


@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    seed=st.integers(0, 2**32 - 1),
    slots=st.integers(1, 6),
    tokens=st.integers(1, 4),
    is_fraction=st.booleans(),
)
def test_any_sequence_of_steps_agrees_with_the_host(
    seed: int, slots: int, tokens: int, is_fraction: bool
) -> None:
    rng = np.random.default_rng(seed)
    pair = Lockstep(slots, is_fraction=is_fraction)
    for _ in range(12):
        pair.step(rng, tokens)


@needs_host_addresses
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("slots", [1, 3, 6])
def test_hybrid_decode_gives_the_same_bits_as_with_the_host_cache(
    slots: int, overlap: bool
) -> None:
    rng = np.random.default_rng(slots)
    sides = []
    for cache, pool in (on_host(slots), on_device(slots)):
        store = PackedExpertStore(LAYERS, HostMemory())
        cpu = CpuMoeExecutor([OrderedKernel(store.bank(i)) for i in range(2)])
        runners = [OrderedKernel(pool.bank(i)) for i in range(2)]
        sides.append((HybridDecodeExecutor(cache, cpu, overlap=overlap), runners, cache))
    for step in range(10):
        layer_id, tokens = step % 2, 1 + step % 3
        hidden = torch.from_numpy(rng.normal(size=(tokens, 16)).astype(np.float32))
        weights, ids = random_routes(rng, tokens, LAYERS[layer_id].experts, 2)
        if tokens == 3:
            weights[1], ids[1] = 0.0, -1
        outs, rewritten = [], []
        for executor, runners, cache in sides:
            cache.cap.set(step % 4)
            own = ids.clone()
            request = HybridDecodeRequest(layer_id, hidden, weights, own)
            outs.append(executor.decode(request, runners[layer_id]))
            rewritten.append(own)
            cache.check_integrity(contents=True)
        assert torch.equal(*rewritten)
        assert torch.equal(*outs) and outs[0].dtype == torch.float64
        assert outs[0][0].any()
    assert sides[0][2].stats() == sides[1][2].stats()
    total = sides[1][2].stats()
    assert sum(c.cpu for c in total) and sum(c.fetched for c in total)


def test_nothing_of_a_step_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels themselves are left out: under the interpreter they do run on the host."""
    calls = []
    for name in ("assign", "copy_fetched"):
        monkeypatch.setattr(device_cache, name, lambda *_, name=name, **__: calls.append(name))
    cache, _ = on_device(slots=3)
    ids = ids_of([4, 2], [2, 5])
    with HostReads():
        for layer_id in range(2):
            cache.ensure_experts_hybrid(layer_id, ids)
            cache.record_stats(layer_id)
            cache.copy_missing()
            cache.ensure_experts_hybrid(layer_id, ids)
            cache.record_stats(layer_id)  # never copied: counted when the next call comes
            cache.cap.set(1)
        cache.ensure_experts(0, ids[:1])
    assert calls == ["assign", "copy_fetched", "assign"] * 2 + ["assign"]


def test_a_launch_offers_as_many_fetches_as_the_call_can_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = []
    monkeypatch.setattr(device_cache, "copy_fetched", lambda *_, most, **__: offered.append(most))
    cache, _ = on_device(slots=3)
    for ids in (ids_of([4]), ids_of([4, 2], [1, 0])):
        cache.ensure_experts_hybrid(0, ids)
        cache.copy_missing()
    assert offered == [1, 3]


def test_the_cap_is_a_device_scalar_and_keeps_its_range() -> None:
    cap = FetchCap.fixed(1)
    cache, _ = on_device(3, cap)
    value = cache.cap.value
    assert value.dtype == torch.int32 and value.device.type == DEVICE.type
    cache.cap.set(2)
    assert cache.cap.value is value and int(value) == 2
    assert int(cap.value) == 1  # the configuration's own is not the cache's
    with pytest.raises(ConfigError, match="set to -1; expected 0"):
        cache.cap.set(-1)
    share, _ = on_device(3, FetchCap.fraction(0.5))
    with pytest.raises(ConfigError, match="set to 65537; expected 0 to 65536"):
        share.cap.set(65537)
    assert int(share.cap.value) == 1 << 15


def test_slots_are_zero_until_the_copy_and_a_lost_fetch_is_undone() -> None:
    cache, pool = on_device(slots=2)
    cache.ensure_experts_hybrid(0, ids_of([3, 1]))
    assert not pool.records(0).any()
    assert cache.resident(0) == {1: 0, 3: 1}  # of the present call
    cache.ensure_experts_hybrid(1, ids_of([8, 3]))
    assert cache.resident(0) == {}
    cache.copy_missing()
    ids = ids_of([1, 5])
    cache.cap.set(1)
    cache.ensure_experts_hybrid(0, ids)
    assert ids.tolist() == [[0, -1]]  # a miss again, not a hit in a slot that holds nothing
    cache.copy_missing()
    assert cache.resident(0) == {1: 0}
    cache.check_integrity(contents=True)


def test_a_copy_that_cannot_be_launched_leaves_the_fetch_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, _ = on_device(slots=2)
    cache.ensure_experts_hybrid(0, ids_of([3, 1]))

    def fails(*_: object, **__: object) -> None:
        raise OSError("no launch")

    with monkeypatch.context() as patch:
        patch.setattr(device_cache, "copy_fetched", fails)
        with pytest.raises(OSError, match="no launch"):
            cache.copy_missing()
    assert cache.resident(0) == {}
    ids = ids_of([3, 1])
    cache.ensure_experts_hybrid(0, ids)
    cache.copy_missing()
    assert cache.resident(0) == {1: 0, 3: 1}
    cache.check_integrity(contents=True)


def test_what_a_kernel_could_not_raise_is_raised_at_the_next_look() -> None:
    cache, _ = on_device(slots=2)
    ids = ids_of([0, 6])  # layer 0 has six experts
    cache.ensure_experts_hybrid(0, ids)
    assert ids.tolist() == [[-1, -1]]
    with pytest.raises(ValueError, match=r"MoE layer 0: an expert id .* to 5"):
        cache.stats()
    cache.cap.value.fill_(-3)
    cache.ensure_experts_hybrid(1, ids_of([0, 6]))
    with pytest.raises(ConfigError, match="MoE layer 1: the fetch cap"):
        cache.check_integrity()
    cache.cap.set(2)
    with pytest.raises(CapacityError, match=r"3 experts .* 2 slots .* cache_slots to 3"):
        cache.ensure_experts(1, ids_of([0, 6], [6, 7]))
    cache.copy_missing()
    assert cache.resident(0) == cache.resident(1) == {}
    cache.check_integrity(contents=True)  # each error is raised once


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("slot_of", 3, 1, "MoE layer 0: .*resident"),
        ("expert_in", 0, 5, "MoE layer 0: .*claims slot"),
        ("last_used", 0, 9, "MoE layer 0: .*was used at step"),
        ("fetch_slots", 1, 1, "MoE layer 0: the fetch list goes on after its 1 entries"),
        ("fetch_slots", 0, 1, "expert 4 was fetched into slot 1, but has 0"),
    ],
)
def test_integrity_check_finds_damage_on_the_device(
    field: str, index: int, value: int, message: str
) -> None:
    cache, _ = on_device(slots=2)
    cache.ensure_experts_hybrid(0, ids_of([4]))
    cache.copy_missing()
    cache.check_integrity(contents=True)
    getattr(cache.state(0), field)[index] = value
    with pytest.raises(RuntimeError, match=message):
        cache.check_integrity()


def test_records_are_pinned_for_a_device() -> None:
    memory = DeviceMemory()
    store = PackedExpertStore(LAYERS, memory, pinned=True)
    assert memory.pinned_bytes == sum(store.records(i).nbytes for i in range(2))
    assert store.plain_layers == frozenset()


class PlainLayer:
    """Layer 1 of the two cannot be read by the device. Kernels must not be given its records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slots: int = 3) -> None:
        memory = DeviceMemory(refuses_after=1)
        self.pool = SlotPool(memory, LAYERS, slots)
        self.store = PackedExpertStore(LAYERS, memory, pinned=True)
        original = device_cache.copy_fetched

        def copy_fetched(state: LruState, records: Tensor, *rest: Tensor, **more: Any) -> None:
            assert records is not self.store.records(1)
            original(state, records, *rest, **more)

        monkeypatch.setattr(device_cache, "copy_fetched", copy_fetched)
        counter = DeviceExpertCounter(len(LAYERS), DEVICE)
        self.cache = DeviceMoeCache(self.store, self.pool, FetchCap.fixed(None), counter)


def test_a_plain_layer_keeps_its_first_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PlainLayer(monkeypatch)
    cache = plain.cache
    assert cache.resident(0) == {} and cache.resident(1) == {0: 0, 1: 1, 2: 2}
    for _ in range(2):  # the second time after every expert was asked for
        ids = ids_of([1, 7], [8, 2], [-1, -1], [0, 1])
        with HostReads():
            cache.ensure_experts_hybrid(1, ids)
            cache.record_stats(1)
        cache.copy_missing()
        assert ids.tolist() == [[1, -1], [-1, 2], [-1, -1], [0, 1]]
        cache.check_integrity(contents=True)
        assert cache.resident(1) == {0: 0, 1: 1, 2: 2}
        others = ids_of([3, 4], [5, 6], [7, 8])
        cache.ensure_experts_hybrid(1, others)
        cache.copy_missing()
        assert others.tolist() == [[-1, -1]] * 3
    counts = cache.stats()[1]
    assert (counts.steps, counts.hits, counts.fetched, counts.cpu) == (2, 6, 0, 4)
    ids = ids_of([5, 4])
    cache.ensure_experts_hybrid(0, ids)  # the other layer fetches as ever
    cache.copy_missing()
    assert ids.min() >= 0
    cache.check_integrity(contents=True)


def test_a_plain_layer_fetches_nothing_under_any_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PlainLayer(monkeypatch).cache
    cache.cap.set(5)
    ids = ids_of([3, 0])
    cache.ensure_experts_hybrid(1, ids)
    cache.copy_missing()
    assert ids.tolist() == [[-1, 0]]


def test_a_plain_layer_whose_every_miss_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PlainLayer(monkeypatch)
    cache = plain.cache
    rng = np.random.default_rng(4)
    for step in range(6):
        _, ids = random_routes(rng, 1, 9, 3)
        asked = ids.clone()
        ids = ids.to(DEVICE)
        cache.ensure_experts(1, ids)
        cache.record_stats(1)
        if step != 3:  # a step that failed before its copies
            cache.copy_missing()
            for expert, slot in zip(asked[0].tolist(), ids[0].tolist(), strict=True):
                assert torch.equal(plain.pool.record(1, slot).cpu(), plain.store.records(1)[expert])
        cache.check_integrity(contents=True)
    counts = cache.stats()[1]
    assert counts.steps == 6 and counts.active == 18 and counts.cpu == 0
    assert counts.fetched > 3


def test_routes_are_counted_without_a_look_at_them() -> None:
    device, host = DeviceExpertCounter(2, DEVICE), ExpertCounter(2)
    ids = ids_of([4, 2], [2, -1], [-1, -1])
    with HostReads():
        device.add_routes(1, ids, 6, on_cpu=True)
        device.add_routes(1, ids, 6, on_cpu=False)
    host.add_routes(1, ids, 6, on_cpu=True)
    host.add_routes(1, ids, 6, on_cpu=False)
    assert device.layers() == host.layers()
    device.reset()
    assert device.layers() == ExpertCounter(2).layers()
