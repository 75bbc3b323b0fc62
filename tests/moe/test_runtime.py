"""What each strategy's runtime is made of, and how it ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freetoken.config import StrategyName
from freetoken.errors import ConfigError
from freetoken.kernels.base import ExpertBank
from freetoken.moe.runtime import MoeConfig, OffloadMoeRuntime
from freetoken.moe.store import MappedExpertStore, PackedExpertStore
from freetoken.moe.strategies import STRATEGIES, make_strategy
from support.moe_fakes import HostMemory, OrderedKernel, OrderedOps, code_addresses, random_layer
from support.reference_ops import read_expert

LAYERS = [random_layer(0, 4), random_layer(1, 4)]


class RecordingOps(OrderedOps):
    """Remembers the banks that were bound."""

    def __init__(self) -> None:
        super().__init__()
        self.bound: list[ExpertBank] = []

    def expert_kernel(self, bank: ExpertBank) -> OrderedKernel:  # type: ignore[override]
        self.bound.append(bank)
        return super().expert_kernel(bank)


def create(strategy: StrategyName, **options: int | bool | None) -> OffloadMoeRuntime:
    config = MoeConfig(strategy, top_k=2, **options)  # type: ignore[arg-type]
    return OffloadMoeRuntime.create(LAYERS, config, HostMemory(), RecordingOps())


def test_a_hybrid_runtime_wires_one_of_each() -> None:
    ops = RecordingOps()
    config = MoeConfig("hybrid", top_k=2, cache_slots=3, max_fetch=1, overlap=False)
    runtime = OffloadMoeRuntime.create(LAYERS, config, HostMemory(), ops)
    assert isinstance(runtime.store, PackedExpertStore)
    assert runtime.slots == runtime.cache.slots == 3
    assert int(runtime.cache.cap.value) == 1
    assert runtime.hybrid.overlap is False
    assert runtime.hybrid.record_stats is True
    assert runtime.hybrid._cache is runtime.cache
    assert runtime.hybrid._cpu is runtime.cpu
    # The CPU computes from the packed store, every layer from its own records.
    for layer_id, bank in enumerate(ops.bound):
        assert bank.owners[0] is runtime.store.records(layer_id)
    assert len(ops.bound) == 2
    assert runtime.pool is not None
    assert runtime.pool.bank(1).experts == 3


def test_overlap_and_the_cap_come_from_the_configuration() -> None:
    runtime = create("hybrid")
    assert runtime.hybrid.overlap is True
    assert runtime.cache.cap.limit(1000) >= 1000
    assert runtime.slots == 2


def test_a_cpu_runtime_maps_and_has_no_slots() -> None:
    runtime = create("cpu")
    assert isinstance(runtime.store, MappedExpertStore)
    assert runtime.pool is runtime.slot_kernel(0) is None
    assert runtime.slots == 0
    for part in ("cache", "hybrid"):
        with pytest.raises(RuntimeError, match="a cpu runtime has no"):
            getattr(runtime, part)


@pytest.mark.parametrize("fits", [True, False])
def test_mapped_experts_are_read_ahead_if_they_fit(fits: bool) -> None:
    memory = HostMemory()
    config = MoeConfig("cpu", top_k=2, fits_memory=fits)
    runtime = OffloadMoeRuntime.create(LAYERS, config, memory, OrderedOps())
    assert runtime.store is not None
    banks = [runtime.store.bank(0), runtime.store.bank(1)] if fits else []
    assert memory.placed == [(code_addresses(bank), True) for bank in banks]


def test_an_offload_runtime_has_no_cpu_side() -> None:
    runtime = create("offload", cache_slots=2)
    assert runtime.cache.slots == 2
    for part in ("cpu", "hybrid"):
        with pytest.raises(RuntimeError, match="offload runtime has no"):
            getattr(runtime, part)


def test_a_fused_runtime_holds_each_expert_once_in_its_own_slot() -> None:
    memory = HostMemory()
    runtime = OffloadMoeRuntime.create(LAYERS, MoeConfig("fused", 2), memory, OrderedOps())
    assert runtime.store is None
    assert runtime.pool is not None
    assert memory.allocated_bytes == sum(4 * layout.record_bytes for layout in runtime.pool.layouts)
    for layer in LAYERS:
        bank = runtime.pool.bank(layer.layer_id)
        for expert in range(4):
            packed = layer.up.experts[expert].reshape(layer.up.rows, -1)
            wanted = torch.from_numpy(layer.up.format.dequantize(packed))
            assert torch.equal(read_expert(bank.up, expert).float(), wanted)


def test_a_negative_fetch_cap_is_refused_before_anything_is_allocated() -> None:
    memory = HostMemory()
    config = MoeConfig("hybrid", top_k=2, max_fetch=-1)
    with pytest.raises(ConfigError, match="max_fetch is -1"):
        OffloadMoeRuntime.create(LAYERS, config, memory, OrderedOps())
    assert memory.allocated_bytes == 0


def test_stats_count_decode_and_prefill_apart_and_reset() -> None:
    runtime = create("cpu")
    strategy = make_strategy(runtime)
    hidden = torch.zeros(2, 16)
    weights = torch.full((2, 2), 0.5)
    ids = torch.tensor([[0, 1], [1, 3]], dtype=torch.int32)
    for layer_id in range(2):
        strategy.prefill(layer_id, hidden, weights, ids)
        strategy.decode(layer_id, hidden[:1], weights[:1], ids[:1])
    stats = runtime.stats()
    assert (stats.total.steps, stats.total.active, stats.total.cpu) == (1, 4, 4)
    assert [counts.cpu for counts in stats.layers] == [2, 2]
    assert (stats.prefill.steps, stats.prefill.active) == (1, 6)
    runtime.reset_stats()
    assert runtime.stats().total.active == runtime.stats().prefill.active == 0


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_close_lets_go_of_everything_and_may_be_repeated(strategy: StrategyName) -> None:
    with create(strategy) as runtime:
        pass
    runtime.close()
    assert runtime.store is None
    assert runtime.pool is None
    for part in ("cache", "cpu", "hybrid"):
        with pytest.raises(RuntimeError, match="closed"):
            getattr(runtime, part)


def test_close_waits_for_pending_cpu_work() -> None:
    runtime = create("hybrid")
    cpu = runtime.cpu
    arguments = (torch.zeros(1, 16), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32))
    cpu.decode_submit(0, *arguments)
    runtime.close()
    assert cpu.pending == 0


def test_layers_may_have_different_numbers_of_experts() -> None:
    layers = [random_layer(0, 4), random_layer(1, 6)]
    fused = OffloadMoeRuntime.create(layers, MoeConfig("fused", 2), HostMemory(), OrderedOps())
    assert fused.slots == 6
    with pytest.raises(ConfigError, match="1 to 4"):
        OffloadMoeRuntime.create(
            layers, MoeConfig("hybrid", 2, cache_slots=5), HostMemory(), OrderedOps()
        )
    assert np.array(fused.experts).tolist() == [4, 6]
