"""Every expert is computed on the CPU, from wherever the store has it."""

from __future__ import annotations

from torch import Tensor

from freetoken.moe.hybrid_decode import GpuExpertRunner
from freetoken.moe.runtime import OffloadMoeRuntime
from freetoken.moe.stats import ExpertCounter


class CpuStrategy:
    """No slots, no cache: one call of the CPU executor."""

    def __init__(self, runtime: OffloadMoeRuntime) -> None:
        self._runtime = runtime

    def register(self, layer_id: int, runner: GpuExpertRunner) -> None:
        """Raises RuntimeError: there is nothing that a callback could be called for."""
        raise RuntimeError(
            f"MoE layer {layer_id} registers experts on slots, but the strategy cpu has no slots"
        )

    def decode(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        self._count(self._runtime.decode_counter, layer_id, topk_ids)
        return self._runtime.cpu.decode(layer_id, hidden_states, topk_weights, topk_ids)

    def prefill(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        self._count(self._runtime.prefill_counter, layer_id, topk_ids)
        return self._runtime.cpu.decode(layer_id, hidden_states, topk_weights, topk_ids)

    def _count(self, counter: ExpertCounter, layer_id: int, topk_ids: Tensor) -> None:
        counter.add_routes(layer_id, topk_ids, self._runtime.experts[layer_id], on_cpu=True)
