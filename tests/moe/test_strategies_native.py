"""The four strategies with the native kernels and worker pool, on quantised experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken.checkpoints.base import TensorEntry
from freetoken.formats import BF16, F32, MXFP4_PAIRS, NVFP4_PAIRS, Q4_0, Q4_1, Q8_0
from freetoken.formats.base import WeightFormat
from freetoken.kernels.activations import ClampedSwiGlu
from freetoken.layers.linear import Linear
from freetoken.layers.moe import OffloadMoELayer
from freetoken.models.spec import MoeSpec
from freetoken.moe.phase import Phase
from freetoken.moe.runtime import MoeConfig, OffloadMoeRuntime
from freetoken.moe.store import LayerExperts
from freetoken.moe.strategies import ExpertStrategy, make_strategy
from freetoken.platforms import Platform, select_platform
from support.moe_fakes import random_layer, random_routes
from support.reference_ops import ReferenceOps

EXPERTS, HIDDEN, INTERMEDIATE = 10, 64, 96
MIXES = {
    "q8_0": (Q8_0, Q8_0, Q8_0),
    "q4_0": (Q4_0, Q4_0, Q4_0),
    "q4_1": (Q4_1, Q4_1, Q4_1),
    "bf16": (BF16, BF16, BF16),
    "mxfp4_pairs": (MXFP4_PAIRS, MXFP4_PAIRS, MXFP4_PAIRS),
    "mixed": (Q4_0, NVFP4_PAIRS, F32),
}
TRAITS: dict[str, dict[str, Any]] = {  # experts of "mixed" formats
    "clamped swiglu with biases": {"activation": ClampedSwiGlu(1.7, 0.2), "biased": True},
    "gelu": {"activation": "gelu"},
}


@pytest.fixture(scope="module")
def platform() -> Iterator[Platform]:
    platform = select_platform("cpu", 2)
    yield platform
    platform.close()


def build(
    platform: Platform, layers: list[LayerExperts], config: MoeConfig
) -> tuple[OffloadMoeRuntime, ExpertStrategy]:
    runtime = OffloadMoeRuntime.create(layers, config, platform, platform.ops)
    strategy = make_strategy(runtime)
    for layer_id in range(len(layers)):
        kernel = runtime.slot_kernel(layer_id)
        if kernel is not None:
            strategy.register(layer_id, kernel)
    return runtime, strategy


def configs(top_k: int) -> Iterator[MoeConfig]:
    yield MoeConfig("fused", top_k)
    for slots in range(top_k, EXPERTS + 1):
        yield MoeConfig("offload", top_k, cache_slots=slots)
    for slots in (1, 2, 3, 5, 8, EXPERTS):
        for cap in (0, 1, 3, None):
            overlap = (slots + (cap or 0)) % 2 == 0
            yield MoeConfig("hybrid", top_k, cache_slots=slots, max_fetch=cap, overlap=overlap)


Step = tuple[int, Tensor, Tensor, Tensor]


def random_steps(top_k: int) -> list[Step]:
    """A prefill of 7 tokens and decode steps, over two layers; one step has a padded row."""
    rng = np.random.default_rng(top_k)
    steps = []
    for index, tokens in enumerate((7, 7, 1, 1, 1, 1, 3, 3)):
        hidden = torch.from_numpy(rng.normal(size=(tokens, HIDDEN)).astype(np.float32))
        weights, ids = random_routes(rng, tokens, EXPERTS, top_k)
        if tokens == 3:
            weights[1], ids[1] = 0.0, -1
        steps.append((index % 2, hidden, weights, ids))
    return steps


def run_steps(strategy: ExpertStrategy, steps: list[Step]) -> list[Tensor]:
    results = []
    for layer_id, hidden, weights, ids in steps:
        run = strategy.prefill if len(hidden) == 7 else strategy.decode
        results.append(run(layer_id, hidden, weights, ids.clone()))
    return results


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_all_strategies_agree(platform: Platform, mix: str, top_k: int) -> None:
    formats: tuple[WeightFormat, WeightFormat, WeightFormat] = MIXES[mix]
    layers = [
        random_layer(i, EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, formats=formats)
        for i in range(2)
    ]
    steps = random_steps(top_k)
    runtime, strategy = build(platform, layers, MoeConfig("cpu", top_k))
    expected = run_steps(strategy, steps)
    runtime.close()
    assert all(torch.isfinite(result).all() for result in expected)
    assert all(result.abs().max() > 1e-3 for result in expected)
    for config in configs(top_k):
        runtime, strategy = build(platform, layers, config)
        with runtime:
            for found, wanted in zip(run_steps(strategy, steps), expected, strict=True):
                assert torch.equal(found, wanted), config


@pytest.mark.parametrize("trait", TRAITS)
def test_biases_and_activations_are_the_same_from_slots(platform: Platform, trait: str) -> None:
    sizes: dict[str, Any] = {"hidden": HIDDEN, "intermediate": INTERMEDIATE}
    formats = MIXES["mixed"]
    plain = [random_layer(i, EXPERTS, formats=formats, **sizes) for i in range(2)]
    layers = [random_layer(i, EXPERTS, formats=formats, **sizes, **TRAITS[trait]) for i in range(2)]
    steps = random_steps(3)
    runtime, strategy = build(platform, plain, MoeConfig("cpu", 3))
    without = run_steps(strategy, steps)
    runtime.close()
    runtime = OffloadMoeRuntime.create(layers, MoeConfig("cpu", 3), platform, ReferenceOps(True))
    reference = run_steps(make_strategy(runtime), steps)
    runtime, strategy = build(platform, layers, MoeConfig("cpu", 3))
    expected = run_steps(strategy, steps)
    runtime.close()
    for found, wanted, other in zip(expected, reference, without, strict=True):
        assert (found - wanted).abs().max() < 0.01 * wanted.abs().max()
        assert (other - wanted).abs().max() > 0.1 * wanted.abs().max()
    for config in (
        MoeConfig("fused", 3),
        MoeConfig("offload", 3, cache_slots=4),
        MoeConfig("hybrid", 3, cache_slots=3, max_fetch=1),
    ):
        runtime, strategy = build(platform, layers, config)
        with runtime:
            for found, wanted in zip(run_steps(strategy, steps), expected, strict=True):
                assert torch.equal(found, wanted), config


@pytest.mark.parametrize("top_k", [3, 4, 8])
def test_layers_give_the_same_bits_whatever_the_strategy_and_the_batch(
    platform: Platform, top_k: int
) -> None:
    """Outputs of whole layers, float32: routed, divided, added and rounded."""
    generator = torch.Generator().manual_seed(top_k)
    formats = MIXES["mixed"]
    experts = random_layer(0, EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, formats=formats)
    weight = torch.randn(EXPERTS, HIDDEN, generator=generator)
    data = weight.numpy().view(np.uint8).reshape(-1)
    router = Linear(
        platform.ops,
        platform.ops.matrix(TensorEntry("router", F32, (EXPERTS, HIDDEN), Path("router"), data)),
    )
    spec = MoeSpec(EXPERTS, top_k, INTERMEDIATE, renormalize=True, activation="silu")
    x = torch.randn(9, HIDDEN, generator=generator)

    def run(config: MoeConfig, phase: Phase, sizes: list[int]) -> Tensor:
        with OffloadMoeRuntime.create([experts], config, platform, platform.ops) as runtime:
            kernel = runtime.slot_kernel(0)
            strategy = make_strategy(runtime)
            layer = OffloadMoELayer(0, router, spec, platform.ops, strategy, kernel)
            return torch.cat([layer.forward(part, phase) for part in x.split(sizes)])

    expected = run(MoeConfig("cpu", top_k), Phase.PREFILL, [9])
    assert expected.dtype == torch.float32
    for config in (MoeConfig("cpu", top_k), *configs(top_k)):
        for phase, sizes in (
            (Phase.PREFILL, [9]),
            (Phase.PREFILL, [4, 5]),
            (Phase.DECODE, [1] * 9),
            (Phase.DECODE, [2, 3, 4]),
        ):
            assert torch.equal(run(config, phase, sizes), expected), (config, phase, sizes)


def test_a_failing_callback_leaves_the_pool_usable(platform: Platform) -> None:
    layers = [
        random_layer(0, EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, formats=MIXES["q8_0"])
    ]
    config = MoeConfig("hybrid", 2, cache_slots=1, max_fetch=1)
    runtime = OffloadMoeRuntime.create(layers, config, platform, platform.ops)
    strategy = make_strategy(runtime)

    def gpu(hidden: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        raise OSError("kernel failed")

    strategy.register(0, gpu)
    _, hidden, weights, ids = random_steps(2)[2]
    for _ in range(20):
        with pytest.raises(OSError, match="kernel failed"):
            strategy.decode(0, hidden, weights, ids.clone())
        assert runtime.cpu.pending == 0
    runtime.cache.check_integrity(contents=True)
    expected = build(platform, layers, MoeConfig("cpu", 2))[1].decode(0, hidden, weights, ids)
    assert torch.equal(runtime.cpu.decode(0, hidden, weights, ids), expected)
    runtime.close()
