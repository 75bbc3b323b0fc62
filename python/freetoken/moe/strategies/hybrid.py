"""The GPU computes what the cache has or fetches, the CPU the rest, at the same time."""

from __future__ import annotations

from torch import Tensor

from freetoken.moe.hybrid_decode import GpuExpertRunner, HybridDecodeRequest
from freetoken.moe.runtime import OffloadMoeRuntime
from freetoken.moe.strategies.base import RunnerTable
from freetoken.moe.strategies.offload import prefill_experts


class HybridStrategy:
    """Decode is the hybrid executor's; prefill, where copying pays, goes as in offload."""

    def __init__(self, runtime: OffloadMoeRuntime) -> None:
        self._runtime = runtime
        self._runners = RunnerTable()

    def register(self, layer_id: int, runner: GpuExpertRunner) -> None:
        self._runners.register(layer_id, runner)

    def decode(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        request = HybridDecodeRequest(layer_id, hidden_states, topk_weights, topk_ids)
        return self._runtime.hybrid.decode(request, self._runners[layer_id])

    def prefill(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        runner = self._runners[layer_id]
        return prefill_experts(
            self._runtime, layer_id, hidden_states, topk_weights, topk_ids, runner
        )
