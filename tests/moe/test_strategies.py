"""All four strategies compute the same, for every cache size and fetch cap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken.config import StrategyName
from freetoken.kernels.base import ExpertMath
from freetoken.moe.runtime import MoeConfig, OffloadMoeRuntime
from freetoken.moe.strategies import ExpertStrategy, make_strategy
from support.moe_fakes import HostMemory, OrderedOps, random_layer, random_routes

EXPERTS, HIDDEN = 6, 16
LAYERS = [random_layer(0, EXPERTS), random_layer(1, EXPERTS)]


@dataclass
class Model:
    """One runtime with its strategy and a counted GPU callback per layer."""

    runtime: OffloadMoeRuntime
    strategy: ExpertStrategy
    gpu_calls: list[tuple[Tensor, Tensor]]


def build(strategy: StrategyName, top_k: int, **options: int | bool | None) -> Model:
    config = MoeConfig(strategy, top_k, **options)  # type: ignore[arg-type]
    runtime = OffloadMoeRuntime.create(LAYERS, config, HostMemory(), OrderedOps())
    model = Model(runtime, make_strategy(runtime), [])
    for layer_id in range(len(LAYERS)):
        kernel = runtime.slot_kernel(layer_id)
        if kernel is not None:
            register(model, layer_id, kernel)
    return model


def register(model: Model, layer_id: int, kernel: ExpertMath) -> None:
    def run(hidden: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        assert int(slots.min()) >= 0
        model.gpu_calls.append((weights, slots))
        return kernel(hidden, weights, slots)

    model.strategy.register(layer_id, run)


def all_builds(top_k: int) -> Iterator[tuple[str, Model]]:
    yield "fused", build("fused", top_k)
    for slots in range(top_k, EXPERTS + 1):
        yield f"offload {slots}", build("offload", top_k, cache_slots=slots)
    for slots in range(1, EXPERTS + 1):
        for cap in (0, 1, 2, None):
            overlap = (slots + (cap or 0)) % 2 == 0
            yield (
                f"hybrid {slots} {cap}",
                build("hybrid", top_k, cache_slots=slots, max_fetch=cap, overlap=overlap),
            )


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_all_strategies_agree(top_k: int) -> None:
    reference = build("cpu", top_k)
    rng = np.random.default_rng(top_k)
    steps = []
    for step in range(4):
        tokens = (5, 1, 2, 3)[step]
        hidden = torch.from_numpy(rng.normal(size=(tokens, HIDDEN)).astype(np.float32))
        weights, ids = random_routes(rng, tokens, EXPERTS, top_k)
        if tokens == 3:  # a padded row
            weights[1], ids[1] = 0.0, -1
        run = reference.strategy.prefill if step == 0 else reference.strategy.decode
        steps.append((step, hidden, weights, ids, run(step % 2, hidden, weights, ids.clone())))
    assert all(torch.isfinite(expected).all() for *_, expected in steps)
    assert not steps[3][4][1].any()
    for name, model in all_builds(top_k):
        for step, hidden, weights, ids, expected in steps:
            run = model.strategy.prefill if step == 0 else model.strategy.decode
            found = run(step % 2, hidden, weights, ids.clone())
            assert found.dtype == torch.float64
            assert torch.equal(found, expected), (name, step)
        total = model.runtime.stats().total
        active = reference.runtime.stats().total.active
        assert total.active >= active, name
        assert total.active == total.hits + total.misses, name
        assert total.misses == total.fetched + total.cpu, name
        if not name.startswith("offload"):  # waves may look an expert up again
            assert total.active == active, name


def test_a_large_offload_batch_goes_in_runs_of_tokens_and_is_one_step() -> None:
    model = build("offload", 2, cache_slots=2)
    ids = torch.tensor([[0, 1], [1, 0], [2, 3], [0, 1]], dtype=torch.int32)
    model.strategy.decode(0, torch.ones(4, HIDDEN), torch.full((4, 2), 0.5), ids)
    assert [len(slots) for _, slots in model.gpu_calls] == [2, 1, 1]
    assert model.runtime.stats().layers[0].steps == 1
    assert model.runtime.stats().layers[0].fetched == 6


def test_prefill_fetches_each_active_expert_once_residents_first() -> None:
    model = build("hybrid", 2, cache_slots=2, max_fetch=0)
    ids = torch.tensor([[0, 1], [4, 5], [0, 5], [-1, -1]], dtype=torch.int32)
    weights = torch.full((4, 2), 0.5)
    weights[3] = 0
    hidden = torch.ones(4, HIDDEN)
    model.strategy.prefill(0, hidden, weights, ids.clone())
    assert model.runtime.stats().prefill.fetched == 4
    assert sorted(model.runtime.cache.resident(0)) == [4, 5]
    model.gpu_calls.clear()
    model.strategy.prefill(0, hidden, weights, ids.clone())
    first_weights, _ = model.gpu_calls[0]
    assert first_weights.tolist() == [[0, 0], [0.5, 0.5], [0, 0.5], [0, 0]]
    prefill = model.runtime.stats().prefill
    assert (prefill.steps, prefill.hits, prefill.fetched) == (2, 2, 6)
    assert model.runtime.stats().total.steps == 0


def test_a_batch_of_padding_alone_is_zero_everywhere() -> None:
    ids = torch.full((2, 2), -1, dtype=torch.int32)
    hidden, weights = torch.ones(2, HIDDEN), torch.zeros(2, 2)
    for name, model in [("cpu", build("cpu", 2)), *all_builds(2)]:
        assert not model.strategy.decode(0, hidden, weights, ids.clone()).any(), name
        assert not model.strategy.prefill(0, hidden, weights, ids.clone()).any(), name
        assert model.runtime.stats().total.active == 0, name


def test_a_failing_callback_leaves_a_hybrid_model_usable() -> None:
    model = build("hybrid", 2, cache_slots=2)
    broken = build("hybrid", 2, cache_slots=2)
    kernel, fails = broken.runtime.slot_kernel(0), [True]
    assert kernel is not None

    def gpu(hidden: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        if fails:
            fails.clear()
            raise OSError("kernel failed")
        return kernel(hidden, weights, slots)

    broken.strategy = make_strategy(broken.runtime)
    broken.strategy.register(0, gpu)
    hidden, weights = torch.ones(1, HIDDEN), torch.full((1, 2), 0.5)
    ids = torch.tensor([[1, 2]], dtype=torch.int32)
    with pytest.raises(OSError, match="kernel failed"):
        broken.strategy.decode(0, hidden, weights, ids.clone())
    assert broken.runtime.cpu.pending == 0
    broken.runtime.cache.check_integrity(contents=True)
    found = broken.strategy.decode(0, hidden, weights, ids.clone())
    assert torch.equal(found, model.strategy.decode(0, hidden, weights, ids.clone()))


@pytest.mark.parametrize("name", ["fused", "offload", "hybrid"])
def test_layers_register_once_and_before_use(name: StrategyName) -> None:
    model = build(name, 2)
    with pytest.raises(RuntimeError, match="MoE layer 0 has registered"):
        model.strategy.register(0, lambda h, w, s: h)
    fresh = make_strategy(model.runtime)
    arguments = (torch.ones(1, HIDDEN), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"MoE layer 1 has not registered .*: \[\]"):
        fresh.decode(1, *arguments)


def test_the_cpu_strategy_refuses_a_callback() -> None:
    with pytest.raises(RuntimeError, match="no slots"):
        build("cpu", 2).strategy.register(0, lambda h, w, s: h)
