"""Every expert has a slot for good: slot e holds expert e."""

from __future__ import annotations

from torch import Tensor

from freetoken.moe.hybrid_decode import GpuExpertRunner
from freetoken.moe.runtime import OffloadMoeRuntime
from freetoken.moe.stats import StepCounter
from freetoken.moe.strategies.base import RunnerTable


class FusedStrategy:
    """All experts are resident, so a call is one call of the layer's callback."""

    def __init__(self, runtime: OffloadMoeRuntime) -> None:
        self._runtime = runtime
        self._runners = RunnerTable()

    def register(self, layer_id: int, runner: GpuExpertRunner) -> None:
        self._runners.register(layer_id, runner)

    def decode(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        self._count(self._runtime.decode_counter, layer_id, topk_ids)
        return self._run(layer_id, hidden_states, topk_weights, topk_ids)

    def prefill(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        self._count(self._runtime.prefill_counter, layer_id, topk_ids)
        return self._run(layer_id, hidden_states, topk_weights, topk_ids)

    def _run(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        weights = topk_weights.masked_fill(topk_ids < 0, 0.0)
        return self._runners[layer_id](hidden_states, weights, topk_ids.clamp_min(0))

    def _count(self, counter: StepCounter, layer_id: int, topk_ids: Tensor) -> None:
        counter.add_routes(layer_id, topk_ids, self._runtime.experts[layer_id], on_cpu=False)
