"""Every expert is computed on the GPU; what is not in a slot is fetched first."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.moe.expert_cache import expert_waves
from freetoken.moe.hybrid_decode import GpuExpertRunner
from freetoken.moe.runtime import OffloadMoeRuntime
from freetoken.moe.strategies.base import RunnerTable


class OffloadStrategy:
    """Decode goes in runs of tokens whose experts fit the slots together: one run, unless the
    batch is large for the cache."""

    def __init__(self, runtime: OffloadMoeRuntime) -> None:
        self._runtime = runtime
        self._runners = RunnerTable()

    def register(self, layer_id: int, runner: GpuExpertRunner) -> None:
        self._runners.register(layer_id, runner)

    def decode(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        cache, runner = self._runtime.cache, self._runners[layer_id]
        parts = []
        for run in cache.token_runs(topk_ids):
            slots = topk_ids[run]
            cache.ensure_experts(layer_id, slots)
            cache.record_into(self._runtime.decode_counter, layer_id, steps=int(run.start == 0))
            cache.copy_missing()
            weights = topk_weights[run].masked_fill(slots < 0, 0.0)
            parts.append(runner(hidden_states[run], weights, slots.clamp_min(0)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def prefill(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        runner = self._runners[layer_id]
        return prefill_experts(
            self._runtime, layer_id, hidden_states, topk_weights, topk_ids, runner
        )


def prefill_experts(
    runtime: OffloadMoeRuntime,
    layer_id: int,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    runner: GpuExpertRunner,
) -> Tensor:
    """Through the runtime's stream, which has kernels of its own; without one, in waves."""
    if runtime.stream is not None:
        return runtime.stream.prefill(layer_id, hidden_states, topk_weights, topk_ids)
    return prefill_in_waves(runtime, layer_id, hidden_states, topk_weights, topk_ids, runner)


def prefill_in_waves(
    runtime: OffloadMoeRuntime,
    layer_id: int,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    runner: GpuExpertRunner,
) -> Tensor:
    """All tokens at once, over as many active experts at a time as there are slots.

    Long batches ask for nearly every expert; this way each is fetched at most once. Eager only:
    the number of waves depends on the ids.
    """
    cache = runtime.cache
    waves = expert_waves(topk_ids, cache.slots, cache.resident(layer_id))
    out = torch.zeros_like(hidden_states, dtype=torch.float64)
    for index, routes in enumerate(waves):
        outside = ~routes
        slots = topk_ids.masked_fill(outside, -1)
        cache.ensure_experts(layer_id, slots)
        cache.record_into(runtime.prefill_counter, layer_id, steps=int(index == 0))
        cache.copy_missing()
        weights = topk_weights.masked_fill(outside, 0.0)
        out += runner(hidden_states, weights, slots.clamp_min(0))
    return out
