"""Every strategy with a cache on the GPU, eager and in a graph, against float64."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from gpu_device import Device

from freetoken.moe.runtime import MoeConfig
from freetoken.moe.store import PackedExpertStore
from freetoken.platforms.gpu import GpuPlatform
from support.expert_layers import Expected, assert_within, expected
from support.gpu_rig import (
    DRY,
    EXPERTS,
    TOP_K,
    UNLIMITED,
    Inputs,
    make_steps,
    model_layers,
    needs_driver,
    needs_gpu,
)

pytestmark = [pytest.mark.gpu, needs_gpu]

LAYERS = model_layers()
STEPS = 2 if DRY else 12

CONFIGS: list[dict[str, Any]] = [
    {"strategy": "fused"},
    {"strategy": "cpu"},
    {"strategy": "offload", "cache_slots": TOP_K},
    {"strategy": "offload", "cache_slots": EXPERTS},
    {"strategy": "hybrid", "cache_slots": 1, "max_fetch": None},
    {"strategy": "hybrid", "cache_slots": 4, "max_fetch": 0},
    {"strategy": "hybrid", "cache_slots": 4, "max_fetch": 1},
    {"strategy": "hybrid", "cache_slots": 4, "max_fetch": 1, "overlap": False},
    {"strategy": "hybrid", "cache_slots": EXPERTS, "max_fetch": None},
]


def name_of(config: dict[str, Any]) -> str:
    return "-".join(str(value) for value in config.values())


def can_capture(config: dict[str, Any], tokens: int) -> bool:
    """offload looks at the ids on the host where more are asked for than there are slots."""
    return config["strategy"] != "offload" or tokens * TOP_K <= config["cache_slots"]


CASES = [
    pytest.param(config, tokens, captured, id=f"{name_of(config)}-{tokens}-{how}")
    for config in CONFIGS
    for tokens in (1, 3)
    for captured, how in ((False, "eager"), (True, "captured"))
    if not captured or can_capture(config, tokens)
]


@pytest.mark.parametrize(("options", "tokens", "captured"), CASES)
def test_decode(
    options: dict[str, Any], tokens: int, captured: bool, device: Device, platform: GpuPlatform
) -> None:
    config = MoeConfig(top_k=TOP_K, **options)
    steps = make_steps(device, platform, LAYERS, config, tokens)
    try:
        steps.run(Inputs.random(tokens, seed=999))  # compiles kernels, pins memory
        if captured:
            steps.capture()
        for seed in range(STEPS):
            inputs = Inputs.random(tokens, seed, padded=tokens > 1 and seed % 2 == 0)
            found = steps.run(inputs)
            for layer_id in range(len(LAYERS)):
                assert_within(found[layer_id], inputs.expected(LAYERS, layer_id))
        total = steps.runtime.stats().total
        assert total.steps == STEPS + 1
        assert total.active == total.hits + total.fetched + total.cpu > 0
        if config.strategy in ("offload", "hybrid"):
            steps.runtime.cache.check_integrity(contents=True)
    finally:
        steps.close()


@pytest.mark.parametrize("slots", [1, EXPERTS])
def test_a_graph_takes_the_cap_of_the_moment(
    slots: int, device: Device, platform: GpuPlatform
) -> None:
    config = MoeConfig("hybrid", TOP_K, cache_slots=slots, max_fetch=0)
    steps = make_steps(device, platform, LAYERS, config, 1)
    try:
        steps.run(Inputs.random(1, seed=0))
        steps.capture()
        runtime = steps.runtime
        runtime.reset_stats()
        steps.run(Inputs.random(1, seed=0))
        assert runtime.stats().total.fetched == 0 and runtime.stats().total.cpu == 3 * TOP_K
        runtime.cache.cap.set(UNLIMITED)
        steps.run(Inputs.random(1, seed=0))
        assert runtime.stats().total.fetched == 3 * min(slots, TOP_K)
        runtime.reset_stats()
        steps.run(Inputs.random(1, seed=0))
        assert runtime.stats().total.hits == 3 * min(slots, TOP_K)  # what was there already
    finally:
        steps.close()


# 15 tokens have fewer than two routes per expert, 40 have more: experts one by one, whole layers.
@pytest.mark.parametrize("tokens", [5] if DRY else [5, 40])
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fused"},
        {"strategy": "cpu"},
        {"strategy": "offload", "cache_slots": TOP_K},
        {"strategy": "hybrid", "cache_slots": 1},  # fewer than an eighth: the copy engine's
        {"strategy": "hybrid", "cache_slots": EXPERTS - 1},
    ],
    ids=name_of,
)
def test_prefill(
    options: dict[str, Any], tokens: int, device: Device, platform: GpuPlatform
) -> None:
    """Passes through all layers, between decode steps that fill slots."""
    steps = make_steps(device, platform, LAYERS, MoeConfig(top_k=TOP_K, **options), 1)
    at = device.device
    try:
        for turn in range(1 if DRY else 3):
            steps.run(Inputs.random(1, seed=turn))
            inputs = Inputs.random(tokens, seed=100 + turn, padded=True)
            given = inputs.ids.to(at)
            found = [
                steps.strategy.prefill(
                    i, inputs.hidden[i].to(at), inputs.weights[i].to(at), given[i]
                )
                for i in range(len(LAYERS))
            ]
            device.synchronize()
            on_gpu = options["strategy"] != "cpu" and tokens * TOP_K > 64
            for i, layer in enumerate(LAYERS):
                parts = inputs.hidden[i], inputs.weights[i], inputs.ids[i]
                assert_within(found[i].cpu(), expected(layer, *parts, bfloat16=on_gpu))
        assert steps.runtime.stats().prefill.active > 0
    finally:
        steps.close()


@needs_driver
def test_pinned_memory_is_given_back(device: Device, platform: GpuPlatform) -> None:
    """The same memory can be pinned again once the store is gone, and by others meanwhile not."""
    memory = platform.allocate(1 << 20)
    records = torch.from_numpy(memory)
    assert platform.pin(records)
    assert not platform.pin(records)
    assert torch.zeros(1, device=device.device).item() == 0, "the refusal is forgotten"
    del records
    gc.collect()
    again = torch.from_numpy(memory)
    assert platform.pin(again)
    store = PackedExpertStore(LAYERS, platform, pinned=True)
    copied = store.records(0).to(device.device, non_blocking=True)
    device.synchronize()
    assert torch.equal(copied.cpu(), store.records(0))


def test_the_bound_would_notice_a_route_that_was_computed_twice() -> None:
    inputs = Inputs.random(2, seed=5)
    wanted = inputs.expected(LAYERS, 0)
    once = Inputs(inputs.hidden, inputs.weights * torch.tensor([1.0, 0.0, 0.0]), inputs.ids)
    twice = Expected(wanted.numbers + once.expected(LAYERS, 0).numbers, wanted.bound)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_within(wanted.numbers, twice)
