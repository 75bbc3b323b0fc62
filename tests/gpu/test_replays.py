"""A thousand replays of one graph: hybrid, the cache's books on the device, the CPU's experts by
handshake, other inputs and routes each time, and another fetch cap every so often."""

from __future__ import annotations

import pytest
import torch
from gpu_device import Device

from freetoken.moe.lru import ExpertLru, FetchCap
from freetoken.moe.runtime import MoeConfig
from freetoken.platforms.gpu import GpuPlatform
from support.expert_layers import assert_within
from support.gpu_rig import (
    DRY,
    EXPERTS,
    TOP_K,
    UNLIMITED,
    Inputs,
    make_steps,
    model_layers,
    needs_gpu,
)

pytestmark = [pytest.mark.gpu, needs_gpu]

REPLAYS, SAME_CAP = (6, 2) if DRY else (1000, 50)
CAPS = (UNLIMITED, 0, 1, 2)
LAYERS = model_layers()


@pytest.mark.parametrize("overlap", [True] if DRY else [True, False])
def test_changing_routes(overlap: bool, device: Device, platform: GpuPlatform) -> None:
    """Results against float64, and which expert is in which slot against the oracle."""
    config = MoeConfig("hybrid", TOP_K, cache_slots=5, overlap=overlap)
    steps = make_steps(device, platform, LAYERS, config, 2)
    oracle = [ExpertLru(EXPERTS, 5) for _ in LAYERS]
    cache = steps.runtime.cache
    try:
        first = Inputs.random(2, seed=0)
        steps.run(first)
        advance(oracle, first, UNLIMITED)
        steps.capture()
        for replay in range(REPLAYS):
            cap = CAPS[replay // SAME_CAP % len(CAPS)]
            if replay % SAME_CAP == 0:
                cache.cap.set(cap)
            inputs = Inputs.random(2, seed=1 + replay, padded=replay % 3 == 0)
            found = steps.run(inputs)
            advance(oracle, inputs, cap)
            for layer_id in range(len(LAYERS)):
                assert_within(found[layer_id], inputs.expected(LAYERS, layer_id))
                assert cache.resident(layer_id) == resident(oracle[layer_id])
            if replay % 250 == 249:
                cache.check_integrity(contents=True)
        total = steps.runtime.stats().total
        assert total.steps == REPLAYS + 1
        assert min(total.hits, total.fetched, total.cpu) > 0
        assert total.active == total.hits + total.fetched + total.cpu
    finally:
        steps.close()


def advance(oracle: list[ExpertLru], inputs: Inputs, cap: int) -> None:
    for lru, ids in zip(oracle, inputs.ids, strict=True):
        lru.assign(ids.clone().numpy(), FetchCap.fixed(cap))


def resident(lru: ExpertLru) -> dict[int, int]:
    return {e: slot for e, slot in enumerate(lru.slot_of[:-1].tolist()) if slot >= 0}


def test_two_batch_sizes_take_turns(device: Device, platform: GpuPlatform) -> None:
    """Two graphs over one cache, as an engine's."""
    config = MoeConfig("hybrid", TOP_K, cache_slots=4, max_fetch=1)
    one = make_steps(device, platform, LAYERS, config, 1)
    three = type(one)(device, one.runtime, 3)
    try:
        for steps in (one, three):
            steps.run(Inputs.random(steps.tokens, seed=0))
            steps.capture()
        for seed in range(REPLAYS // 2):
            steps = three if seed % 3 == 2 else one
            inputs = Inputs.random(steps.tokens, seed=5000 + seed)
            found = steps.run(inputs)
            if seed % 5 == 0:
                for layer_id in range(len(LAYERS)):
                    assert_within(found[layer_id], inputs.expected(LAYERS, layer_id))
        one.runtime.cache.check_integrity(contents=True)
    finally:
        three.release()
        one.close()


def test_replays_without_waiting_for_each_other(device: Device, platform: GpuPlatform) -> None:
    """The host runs ahead of the stream; every replay's result is kept on the device."""
    config = MoeConfig("hybrid", TOP_K, cache_slots=3, max_fetch=1)
    steps = make_steps(device, platform, LAYERS, config, 1)
    inputs = [Inputs.random(1, seed=7000 + i) for i in range(4 if DRY else 100)]
    ids = torch.stack([one.ids for one in inputs]).to(device.device)
    hidden = torch.stack([one.hidden for one in inputs]).to(device.device)
    try:
        steps.run(inputs[0])
        steps.weights.copy_(inputs[0].weights)
        steps.capture()
        kept = []
        for i in range(len(inputs)):
            steps.ids.copy_(ids[i])
            steps.hidden.copy_(hidden[i])
            steps.cpu.announce(len(LAYERS))
            steps.replay_now()
            kept.append(steps.outs.clone())
        device.synchronize()
        steps.cpu.check()
        for one, found in zip(inputs, kept, strict=True):
            shared = Inputs(one.hidden, inputs[0].weights, one.ids)
            for layer_id in range(len(LAYERS)):
                assert_within(found[layer_id].cpu(), shared.expected(LAYERS, layer_id))
    finally:
        steps.close()
