"""MoE layers in a captured step that is replayed with other routes.

The cache whose books lie on the device is compared with the one on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken import _native
from freetoken.moe import device_cache
from freetoken.moe.cpu_executor import CpuMoeExecutor
from freetoken.moe.device_cache import DeviceMoeCache, read_back
from freetoken.moe.hybrid_decode import HybridDecodeExecutor, HybridDecodeRequest
from freetoken.moe.lru import FetchCap
from freetoken.moe.offload_cache import OffloadMoeCache
from freetoken.moe.runtime import MoeConfig, OffloadMoeRuntime
from freetoken.moe.stats import DeviceExpertCounter, ExpertCounter
from freetoken.moe.step_guard import CacheMarks, DeviceGuard
from freetoken.moe.store import PackedExpertStore, SlotPool
from freetoken.moe.strategies.fused import FusedStrategy
from freetoken.moe.strategies.offload import OffloadStrategy
from support.moe_fakes import (
    DeviceMemory,
    HostMemory,
    OrderedKernel,
    OrderedOps,
    random_layer,
    random_routes,
)
from support.traced_graphs import TracedExecutor, TracedGraphs

LAYERS = [random_layer(0, 6), random_layer(1, 9)]
TOKENS, TOP_K, HIDDEN = 3, 2, 16

pytestmark = pytest.mark.skipif(
    DeviceMemory.device.type != "cpu", reason="the reference kernel reads slots at host addresses"
)

Layer = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> TracedGraphs:
    """What sees the device cache's two kernels, which a capture does not run."""
    made = TracedGraphs()
    assign, copy = device_cache.assign, device_cache.copy_fetched

    def traced_assign(state: Any, ids: Tensor, cap: Tensor | None, **options: Any) -> None:
        made.call(assign, state, ids, cap, at_capture=spoil, **options)

    def spoil(state: Any, ids: Tensor, cap: Tensor | None, **options: Any) -> None:
        ids.fill_(-1)

    def traced_copy(*arguments: Any, **options: Any) -> None:
        made.call(copy, *arguments, at_capture=lambda *_, **__: None, **options)

    monkeypatch.setattr(device_cache, "assign", traced_assign)
    monkeypatch.setattr(device_cache, "copy_fetched", traced_copy)
    return made


def caches(slots: int) -> tuple[OffloadMoeCache, DeviceMoeCache, list[SlotPool]]:
    memory, pools = DeviceMemory(), [SlotPool(HostMemory(), LAYERS, slots)]
    pools.append(SlotPool(memory, LAYERS, slots))
    host = OffloadMoeCache(
        PackedExpertStore(LAYERS, HostMemory()),
        pools[0],
        FetchCap.fixed(1),
        ExpertCounter(len(LAYERS)),
    )
    device = DeviceMoeCache(
        PackedExpertStore(LAYERS, memory, pinned=True),
        pools[1],
        FetchCap.fixed(1),
        DeviceExpertCounter(len(LAYERS), memory.device),
    )
    return host, device, pools


class Step:
    """Both layers, on inputs that stay where they are. The last row is nobody's if padded."""

    def __init__(self, graphs: TracedGraphs, layer: Layer) -> None:
        self.hidden = torch.zeros(TOKENS, HIDDEN)
        self.routes = [
            (torch.zeros(TOKENS, TOP_K), torch.zeros(TOKENS, TOP_K, dtype=torch.int32))
            for _ in LAYERS
        ]
        self._layer = layer
        self._graphs = graphs
        self.graph: Any = None

    def fill(self, rng: np.random.Generator, *, padded: bool) -> None:
        self.hidden.copy_(torch.from_numpy(rng.normal(size=(TOKENS, HIDDEN))))
        for layer, (weights, ids) in zip(LAYERS, self.routes, strict=True):
            new_weights, new_ids = random_routes(rng, TOKENS, layer.experts, TOP_K)
            weights.copy_(new_weights)
            ids.copy_(new_ids)
            if padded:
                weights[-1], ids[-1] = 0.0, -1

    def compute(self, layer: Layer) -> Tensor:
        x, rows = self.hidden, []
        for layer_id, (weights, ids) in enumerate(self.routes):
            rows.append(layer(layer_id, x, weights, ids.clone()))
            x = rows[-1].float()
        return torch.stack(rows)

    def run(self, *, replayed: bool) -> Tensor:
        if not replayed:
            return self.compute(self._layer)
        if self.graph is None:
            self.graph = self._graphs.capture(lambda: self.compute(self._layer))
        self._graphs.synchronize()
        result: Tensor = self.graph.replay()
        return result


def compare(host: OffloadMoeCache, device: DeviceMoeCache) -> None:
    device.check_integrity(contents=True)
    assert host.stats() == device.stats()
    for layer_id in range(len(LAYERS)):
        lru, found = host._lrus[layer_id], read_back(device.state(layer_id))
        assert lru.step == found.step
        for name in ("slot_of", "last_active", "expert_in", "last_used"):
            assert getattr(lru, name).tolist() == getattr(found, name).tolist(), name


def test_hybrid_steps_replayed_with_other_routes_and_caps(graphs: TracedGraphs) -> None:
    host, device, pools = caches(slots=3)

    def layers(cache: Any, pool: SlotPool, cpu: Any) -> Layer:
        executor: HybridDecodeExecutor[Any] = HybridDecodeExecutor(cache, cpu)
        kernels = [OrderedKernel(pool.bank(layer_id)) for layer_id in range(len(LAYERS))]

        def layer(layer_id: int, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            def runner(*arguments: Tensor) -> Tensor:
                result: Tensor = graphs.call(kernels[layer_id], *arguments)
                return result

            return executor.decode(HybridDecodeRequest(layer_id, x, weights, ids), runner)

        return layer

    store = PackedExpertStore(LAYERS, HostMemory())
    cpu = CpuMoeExecutor([OrderedKernel(store.bank(i)) for i in range(len(LAYERS))])
    traced = TracedExecutor(graphs, cpu)
    reference, step = layers(host, pools[0], cpu), Step(graphs, layers(device, pools[1], traced))
    rng = np.random.default_rng(3)
    for count in range(9):
        step.fill(rng, padded=count % 3 == 1)
        for cache in (host, device):
            cache.cap.set((2, 0, 3)[count // 3])
        traced.expected = len(LAYERS) if count > 1 else 0
        assert torch.equal(step.run(replayed=count > 1), step.compute(reference)), count
        compare(host, device)
    assert graphs.captures == 1
    assert min(device.stats()[1].hits, device.stats()[1].fetched, device.stats()[1].cpu) > 3


def test_offload_steps_replayed_with_other_routes(graphs: TracedGraphs) -> None:
    host, device, pools = caches(slots=6)

    def strategy(cache: Any, pool: SlotPool) -> Layer:
        runtime: Any = SimpleNamespace(cache=cache, decode_counter=cache.counter)
        made = OffloadStrategy(runtime)
        for layer_id in range(len(LAYERS)):
            kernel = OrderedKernel(pool.bank(layer_id))
            made.register(layer_id, lambda *given, kernel=kernel: graphs.call(kernel, *given))
        return made.decode

    reference, step = strategy(host, pools[0]), Step(graphs, strategy(device, pools[1]))
    rng = np.random.default_rng(4)
    for count in range(8):
        step.fill(rng, padded=count % 3 == 1)
        assert torch.equal(step.run(replayed=count > 1), step.compute(reference)), count
        compare(host, device)
    assert device.stats()[1].fetched > 8


def test_a_device_counts_fused_steps_in_replays(graphs: TracedGraphs) -> None:
    counters = ExpertCounter(len(LAYERS)), DeviceExpertCounter(len(LAYERS), torch.device("cpu"))

    def strategy(counter: Any) -> Layer:
        experts = [layer.experts for layer in LAYERS]
        runtime: Any = SimpleNamespace(decode_counter=counter, experts=experts)
        made = FusedStrategy(runtime)
        for layer_id in range(len(LAYERS)):
            made.register(layer_id, lambda hidden, weights, ids: hidden.double() + 1)
        return made.decode

    step = Step(graphs, strategy(counters[1]))
    rng = np.random.default_rng(5)
    for count in range(8):
        step.fill(rng, padded=count % 3 == 1)
        step.run(replayed=count > 1)
        step.compute(strategy(counters[0]))
        assert counters[0].layers() == counters[1].layers(), count
    assert counters[1].layers()[0].steps == 8


class Pinned:
    """Host memory that remembers what was asked for."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.shapes.append(shape)
        return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("strategy", ["offload", "hybrid"])
def test_a_step_with_a_wrong_id_is_not_handed_out(
    strategy: str, replayed: bool, graphs: TracedGraphs
) -> None:
    """Its kernels can only mark it, and what they leave looks like a result."""
    _, cache, _ = caches(slots=6)
    ensure = cache.ensure_experts if strategy == "offload" else cache.ensure_experts_hybrid

    def layer(layer_id: int, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        ensure(layer_id, ids)
        cache.copy_missing()
        return torch.where(ids < 0, 0.0, weights).sum(-1, dtype=torch.float64)

    step, rng = Step(graphs, layer), np.random.default_rng(6)
    memory = Pinned()
    guard = DeviceGuard(graphs.synchronize, marks=CacheMarks(cache, memory))
    assert guard.capturable
    assert guard.handshakes == 0
    for _ in range(2):
        step.fill(rng, padded=True)
        with guard.replaying(0):
            step.run(replayed=replayed)
        guard.after_step()
        step.fill(rng, padded=True)
        step.routes[1][1][0, 0] = LAYERS[1].experts
        assert step.run(replayed=replayed)[1].sum() == 0
        with pytest.raises(ValueError, match="MoE layer 1: an expert id is out of range"):
            guard.after_step()
    step.fill(rng, padded=False)
    step.run(replayed=replayed)
    guard.after_step()  # nothing is left of the wrong one
    assert memory.shapes == [(len(LAYERS), 4)]
    cache.check_integrity(contents=True)
    assert graphs.captures == replayed


def test_marks_are_the_error_of_their_own_step_alone() -> None:
    """Also where the CPU's part of it failed too."""
    _, cache, _ = caches(slots=6)

    class Executor:
        capturable, submits, cleared, failing = True, 3, 0, True

        def check(self) -> None:
            if self.failing:
                raise _native.HandshakeError("layer 1: out of luck")

        def clear(self) -> None:
            self.cleared += 1
            self.failing = False

        def announce(self, handshakes: int) -> None: ...

    executor = Executor()
    guard = DeviceGuard(lambda: None, executor, CacheMarks(cache, Pinned()))
    cache.ensure_experts(0, torch.tensor([[99, 0]], dtype=torch.int32))
    with pytest.raises(ValueError, match="MoE layer 0") as found:
        guard.after_step()
    assert "out of luck" in str(found.value.__context__)
    assert executor.cleared == 1
    guard.after_step()


@pytest.mark.parametrize(
    ("strategy", "slots", "most"),
    [("cpu", None, None), ("fused", None, None), ("hybrid", 3, None), ("offload", 5, 2)],
)
def test_what_reads_ids_on_the_host_cannot_be_captured(
    strategy: Any, slots: int | None, most: int | None
) -> None:
    config = MoeConfig(strategy, TOP_K, cache_slots=slots)
    with OffloadMoeRuntime.create(LAYERS, config, HostMemory(), OrderedOps()) as runtime:
        found = [tokens for tokens in range(1, 9) if runtime.can_capture_decode(tokens)]
    assert found == list(range(1, (most or 8) + 1))
