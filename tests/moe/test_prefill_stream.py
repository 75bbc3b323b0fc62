"""Streamed prefill: same bits as the CPU's, in an order that no stream could break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken.errors import CapacityError
from freetoken.moe import prefill_stream
from freetoken.moe.cpu_executor import CpuMoeExecutor
from freetoken.moe.device_cache import DeviceMoeCache
from freetoken.moe.lru import FetchCap
from freetoken.moe.offload_cache import OffloadMoeCache
from freetoken.moe.prefill_stream import PrefillStream
from freetoken.moe.runtime import GpuExperts, MoeConfig, OffloadMoeRuntime
from freetoken.moe.stats import DeviceExpertCounter
from freetoken.moe.store import LayerExperts, PackedExpertStore, RecordLayout, SlotPool
from freetoken.moe.strategies import make_strategy
from freetoken.moe.timeline import timelines
from support.host_reads import HostReads
from support.moe_fakes import (
    TOY_F32,
    TOY_Q8,
    DeviceMemory,
    OrderedKernel,
    OrderedOps,
    random_layer,
    random_routes,
)

DEVICE = DeviceMemory.device
HIDDEN, EXPERTS, TOP_K = 16, 6, 2
# Records of different sizes, so that a buffer's rows are not the same from layer to layer.
LAYERS = [
    random_layer(0, EXPERTS),
    random_layer(1, EXPERTS, formats=(TOY_F32, TOY_Q8, TOY_Q8), biased=True),
    random_layer(2, EXPERTS + 3),
    random_layer(3, EXPERTS, intermediate=24),
]

pytestmark = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="the reference kernel reads buffers at host addresses"
)


@dataclass
class World:
    """Who has touched what when: accesses of two timelines to the same memory, one of them a
    write, must be ordered by events."""

    log: list[tuple[str, int]] = field(default_factory=list)
    accesses: dict[object, list[tuple[FakeTimeline, int, bool]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.compute, self.copy = FakeTimeline(self), FakeTimeline(self)
        self.current = self.compute

    def access(self, memory: object, *, writes: bool) -> None:
        now = self.current
        now.clock[now] += 1
        earlier = self.accesses.setdefault(memory, [])
        for timeline, tick, wrote in earlier:
            ordered = now.clock.get(timeline, 0) >= tick
            assert ordered or not (writes or wrote), f"{memory} is touched without order"
        earlier.append((now, now.clock[now], writes))


class FakeTimeline:
    """A vector clock: for each timeline how far this one has waited for it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock: dict[FakeTimeline, int] = {self: 0}
        self.waited: list[dict[FakeTimeline, int]] = []

    @contextmanager
    def use(self) -> Iterator[None]:
        before, self.world.current = self.world.current, self
        try:
            yield
        finally:
            self.world.current = before

    def record(self) -> dict[FakeTimeline, int]:
        return dict(self.clock)

    def wait(self, event: dict[FakeTimeline, int]) -> None:
        self.waited.append(event)
        for timeline, tick in event.items():
            self.clock[timeline] = max(self.clock.get(timeline, 0), tick)


def test_the_fake_finds_unordered_accesses() -> None:
    world = World()
    with world.copy.use():
        world.access("a", writes=True)
    with pytest.raises(AssertionError, match="a is touched without order"):
        world.access("a", writes=False)
    world = World()
    world.access("a", writes=False)
    event = world.compute.record()
    world.access("b", writes=False)
    world.copy.wait(event)
    with world.copy.use():
        world.access("a", writes=True)
        world.access("b", writes=False)  # both read
        with pytest.raises(AssertionError, match="b is touched without order"):
            world.access("b", writes=True)


class Model:
    """A stream over LAYERS whose accesses are watched. Layer `fails_at` cannot compute."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, slots: int, pinned: int | None = None
    ) -> None:
        """`pinned`: how many layers the system lets pin; None: all."""
        self.world = World()
        self.slots = slots
        self.fails_at = -1
        memory = DeviceMemory(refuses_after=pinned)
        self.store = PackedExpertStore(LAYERS, memory, pinned=True)
        self.pool = SlotPool(memory, LAYERS, slots)
        counter = DeviceExpertCounter(len(LAYERS), DEVICE)
        self.cache = DeviceMoeCache(self.store, self.pool, FetchCap.fixed(None), counter)
        self.watch(monkeypatch, "copy_layer", target=3)
        self.watch(monkeypatch, "copy_layer_by_engine", target=1)
        self.watch(monkeypatch, "copy_used_plain", target=2)
        self.bound = 0
        lines = (self.world.compute, self.world.copy)
        self.stream = PrefillStream(
            self.store, self.pool, self.cache, memory, bind=self.bind, timelines=lines
        )

    def watch(self, monkeypatch: pytest.MonkeyPatch, name: str, *, target: int) -> None:
        original: Callable[..., None] = getattr(prefill_stream, name)

        def copy(*arguments: Tensor) -> None:
            source = arguments[0 if name == "copy_layer_by_engine" else 1]
            layer_id = next(i for i in range(len(LAYERS)) if self.store.records(i) is source)
            self.world.log.append((name, layer_id))
            self.world.access(arguments[target].data_ptr(), writes=True)
            if name == "copy_layer":
                self.world.access(("slots", layer_id), writes=False)
            original(*arguments)

        monkeypatch.setattr(prefill_stream, name, copy)

    def bind(self, layout: RecordLayout, records: Tensor) -> OrderedKernel:
        world, layer_id = self.world, self.bound
        self.bound += 1

        class Watched(OrderedKernel):
            def __call__(kernel, *arguments: Tensor) -> Tensor:
                if layer_id == self.fails_at:
                    raise OSError("kernel failed")
                world.log.append(("compute", layer_id))
                world.access(records.data_ptr(), writes=False)
                return super().__call__(*arguments)

        return Watched(layout.bank(records))

    def decode(self, layer_id: int, *experts: int) -> None:
        """Bring experts into slots, as a decode step does."""
        ids = torch.tensor([experts], dtype=torch.int32, device=DEVICE)
        self.cache.ensure_experts(layer_id, ids)
        self.world.access(("slots", layer_id), writes=True)
        self.cache.copy_missing()

    def prefill(self, tokens: int, seed: int = 0, *, padded: bool = False) -> None:
        """All layers; each result is compared with the CPU's."""
        rng = np.random.default_rng(seed)
        for layer in LAYERS:
            hidden = torch.from_numpy(rng.normal(size=(tokens, HIDDEN)).astype(np.float32))
            weights, ids = random_routes(rng, tokens, layer.experts, TOP_K)
            if padded:
                weights[0], ids[0] = 0.0, -1
            given_ids = ids.clone()
            found = self.stream.prefill(layer.layer_id, hidden, weights, given_ids)
            assert torch.equal(found, truth(layer, hidden, weights, ids))
            assert torch.equal(given_ids, ids)


def truth(layer: LayerExperts, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    records = torch.zeros(layer.experts, RecordLayout.of(layer).record_bytes, dtype=torch.uint8)
    for expert in range(layer.experts):
        RecordLayout.of(layer).pack(layer, expert, records[expert].numpy())
    return OrderedKernel(RecordLayout.of(layer).bank(records))(hidden, weights, ids)


MANY, FEW = 12, 2  # tokens: of 24 routes and 6 to 9 experts; of 4 routes


@pytest.mark.parametrize("slots", [1, 3, 6])
@pytest.mark.parametrize("tokens", [(MANY,), (FEW,), (MANY, MANY), (MANY, FEW, MANY, FEW)])
def test_prefill_gives_the_cpus_bits_and_leaves_the_slots_alone(
    monkeypatch: pytest.MonkeyPatch, slots: int, tokens: tuple[int, ...]
) -> None:
    model = Model(monkeypatch, slots)
    model.decode(0, *range(1, 1 + min(slots, 3)))
    model.decode(2, 8)
    before = [
        tensor.clone()
        for i in range(len(LAYERS))
        for tensor in (*vars(model.cache.state(i)).values(), model.pool.records(i))
    ]
    for seed, count in enumerate(tokens):
        model.prefill(count, seed, padded=seed % 2 == 1)
    after = [
        tensor
        for i in range(len(LAYERS))
        for tensor in (*vars(model.cache.state(i)).values(), model.pool.records(i))
    ]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_the_next_layer_is_on_its_way_while_one_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, slots=3)
    model.prefill(MANY)
    names = [(name.replace("copy_layer", "copy"), layer) for name, layer in model.world.log]
    assert names == [
        ("copy", 0),
        ("copy", 1),
        ("compute", 0),
        ("copy", 2),
        ("compute", 1),
        ("copy", 3),
        ("compute", 2),
        ("compute", 3),
    ]


def test_computation_waits_for_its_own_layer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, slots=3)
    model.prefill(MANY)
    compute, copy = model.world.compute, model.world.copy
    assert [event[copy] for event in compute.waited] == [2, 4, 6, 8]  # two accesses in a copy


@pytest.mark.parametrize(("slots", "name"), [(1, "by_engine"), (3, "copy_layer")])
def test_the_copy_engine_serves_where_few_experts_have_slots(
    monkeypatch: pytest.MonkeyPatch, slots: int, name: str
) -> None:
    monkeypatch.setattr(prefill_stream, "KERNEL_SLOT_SHARE", 0.3)
    model = Model(monkeypatch, slots)
    model.prefill(MANY)
    copies = [log for log, _ in model.world.log if log != "compute"]
    assert len(copies) == 4 and all(copy.endswith(name) for copy in copies)


@pytest.mark.parametrize("tokens", [MANY, FEW])
def test_experts_in_slots_do_not_cross_the_bus(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """A slot with another expert's bytes shows where they come from."""
    model = Model(monkeypatch, slots=3)
    model.decode(1, 4)
    model.pool.fill(1, 0, model.store.records(1)[2])
    ids = torch.full((tokens, TOP_K), 4, dtype=torch.int32)
    hidden, weights = torch.ones(tokens, HIDDEN), torch.full((tokens, TOP_K), 0.5)
    model.stream.prefill(0, hidden, weights, ids)
    found = model.stream.prefill(1, hidden, weights, ids)
    assert torch.equal(found, truth(LAYERS[1], hidden, weights, ids.fill_(2)))


def test_a_slot_whose_copy_never_came_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, slots=3)
    for layer_id in range(4):
        model.cache.ensure_experts(layer_id, torch.tensor([[0, 1]], dtype=torch.int32))
    model.prefill(MANY)
    model.prefill(FEW)
    assert sum(counts.hits for counts in model.stream.counter.layers()) == 0


@pytest.mark.parametrize("tokens", [MANY, FEW])
@pytest.mark.parametrize("fails_at", [0, 1, 2, 3])
def test_a_pass_that_failed_halfway_does_not_harm_the_next(
    monkeypatch: pytest.MonkeyPatch, fails_at: int, tokens: int
) -> None:
    model = Model(monkeypatch, slots=3)
    model.fails_at = fails_at
    with pytest.raises(OSError, match="kernel failed"):
        model.prefill(MANY)
    model.fails_at = -1
    for buffer in model.stream._buffers:  # a copy that raced with a decode step's left anything
        buffer.memory.fill_(255)
    model.prefill(tokens)


@pytest.mark.parametrize("slots", [1, 3, 6])
@pytest.mark.parametrize("pinned", [0, 2])
def test_layers_that_the_gpu_cannot_read_come_by_the_copy_engine(
    monkeypatch: pytest.MonkeyPatch, slots: int, pinned: int
) -> None:
    model = Model(monkeypatch, slots, pinned)
    model.decode(0, *range(min(slots, 3)))
    for seed, tokens in enumerate((MANY, FEW, MANY, FEW)):
        model.prefill(tokens, seed, padded=seed > 1)
    by_kernel = {layer for name, layer in model.world.log if name == "copy_layer"}
    otherwise = {name for name, layer in model.world.log if layer >= pinned and "copy" in name}
    assert by_kernel == set(range(pinned))
    assert otherwise == {"copy_layer_by_engine", "copy_used_plain"}


def test_only_experts_in_use_are_copied_from_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, slots=1, pinned=0)
    for buffer in model.stream._buffers:
        buffer.memory.fill_(7)
    ids = torch.tensor([[4, 1], [1, -1]], dtype=torch.int32)
    hidden, weights = torch.ones(2, HIDDEN), torch.full((2, TOP_K), 0.5)
    model.stream.prefill(0, hidden, weights, ids)
    rows = model.stream._rows[0]
    for expert in range(EXPERTS):
        copied = torch.equal(rows[expert], model.store.records(0)[expert])
        assert copied == (expert in (1, 4)) and (copied or (rows[expert] == 7).all())


def test_counts_are_of_the_experts_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, slots=3)
    model.decode(0, 1, 2)
    ids = torch.tensor([[1, 4], [4, 5], [-1, -1]], dtype=torch.int32)
    hidden, weights = torch.ones(3, HIDDEN), torch.full((3, TOP_K), 0.5)
    model.stream.prefill(0, hidden, weights, ids)
    model.stream.prefill(0, hidden, weights, ids)
    counts = model.stream.counter.layers()[0]
    assert (counts.steps, counts.active, counts.hits, counts.fetched, counts.cpu) == (2, 6, 2, 4, 0)
    assert model.cache.stats()[0].steps == 0


@pytest.mark.parametrize("tokens", [MANY, FEW])
def test_nothing_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Kernels are left out: under the interpreter they do run on the host."""
    copies = []
    for name in ("copy_layer", "copy_layer_by_engine"):
        monkeypatch.setattr(prefill_stream, name, lambda *_: copies.append(1))
    memory = DeviceMemory()
    store, pool = PackedExpertStore(LAYERS, memory), SlotPool(memory, LAYERS, 3)
    counter = DeviceExpertCounter(len(LAYERS), DEVICE)
    cache = DeviceMoeCache(store, pool, FetchCap.fixed(None), counter)
    stream = PrefillStream(
        store,
        pool,
        cache,
        memory,
        bind=lambda layout, records: lambda hidden, weights, ids: hidden.double(),  # type: ignore[arg-type,return-value]
        timelines=timelines(DEVICE),
    )
    hidden, weights = torch.ones(tokens, HIDDEN), torch.full((tokens, TOP_K), 0.5)
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int32)
    with HostReads():
        for layer_id in range(4):
            stream.prefill(layer_id, hidden, weights, ids)
    assert len(copies) == 4


def test_two_layers_of_experts_must_fit() -> None:
    memory = DeviceMemory()
    store, pool = PackedExpertStore(LAYERS, memory), SlotPool(memory, LAYERS, 1)
    cache = DeviceMoeCache(store, pool, FetchCap.fixed(None), DeviceExpertCounter(4, DEVICE))
    memory.limit_bytes = memory.allocated_bytes + store.records(3).nbytes
    with pytest.raises(CapacityError):
        PrefillStream(
            store,
            pool,
            cache,
            memory,
            bind=lambda layout, records: OrderedKernel(layout.bank(records)),
            timelines=timelines(DEVICE),
        )


@pytest.mark.parametrize("strategy", ["offload", "hybrid"])
@pytest.mark.parametrize(("slots", "pinnable"), [(2, None), (5, None), (3, 30_000)])
def test_a_runtime_on_a_gpu_computes_what_the_cpu_does(
    strategy: str, slots: int, pinnable: int | None
) -> None:
    def create(config: MoeConfig, gpu: GpuExperts | None) -> OffloadMoeRuntime:
        return OffloadMoeRuntime.create(LAYERS, config, DeviceMemory(), OrderedOps(), gpu)

    gpu = GpuExperts(
        DEVICE,
        bind=lambda layout, records: OrderedKernel(layout.bank(records)),
        cpu_executor=CpuMoeExecutor,
    )
    config = MoeConfig(
        strategy,  # type: ignore[arg-type]
        TOP_K,
        cache_slots=slots,
        max_fetch=1,
        pinnable_bytes=pinnable,
    )
    reference = make_strategy(create(MoeConfig("cpu", TOP_K), None))
    with create(config, gpu) as runtime:
        assert isinstance(runtime.cache, DeviceMoeCache)
        assert 0 < len(runtime.plain_layers) < len(LAYERS) or pinnable is None
        graphs = strategy == "hybrid" or not runtime.plain_layers
        assert runtime.can_capture_decode(1) == graphs
        strategy_on_gpu = make_strategy(runtime)
        for layer_id in range(len(LAYERS)):
            kernel = runtime.slot_kernel(layer_id)
            assert kernel is not None
            strategy_on_gpu.register(layer_id, kernel)
        rng = np.random.default_rng(slots)
        for step, tokens in enumerate((MANY, 1, 2, 4, FEW, 1)):
            for layer in LAYERS:
                hidden = torch.from_numpy(rng.normal(size=(tokens, HIDDEN)).astype(np.float32))
                weights, ids = random_routes(rng, tokens, layer.experts, TOP_K)
                results = [
                    (side.prefill if step % 4 == 0 else side.decode)(
                        layer.layer_id, hidden, weights, ids.clone()
                    )
                    for side in (reference, strategy_on_gpu)
                ]
                assert torch.equal(*results), (step, layer.layer_id)
        runtime.cache.check_integrity(contents=True)
        stats = runtime.stats()
        assert (stats.total.steps, stats.prefill.steps) == (4, 2)
        assert stats.total.active == stats.total.hits + stats.total.misses > 0
        assert (stats.total.cpu > 0) == (strategy == "hybrid")
        runtime.reset_stats()
        assert runtime.stats().total.active == runtime.stats().prefill.active == 0
    assert runtime.stream is None


def test_a_runtime_without_a_gpu_keeps_its_books_on_the_host() -> None:
    config = MoeConfig("hybrid", TOP_K, cache_slots=2)
    runtime = OffloadMoeRuntime.create(LAYERS, config, DeviceMemory(), OrderedOps())
    assert isinstance(runtime.cache, OffloadMoeCache)
    assert runtime.stream is None
