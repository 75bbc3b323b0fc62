"""Every expert is computed on the CPU, from wherever the store has it."""

from __future__ import annotations

from torch import Tensor

from freetoken.moe.hybrid_decode import GpuExpertRunner
from freetoken.moe.runtime import OffloadMoeRuntime


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
        self._runtime.count_decode(layer_id, topk_ids)
        return self._runtime.cpu.decode(layer_id, hidden_states, topk_weights, topk_ids)

    def prefill(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        runtime = self._runtime
        runtime.prefill_counter.add_routes(
            layer_id, topk_ids, runtime.experts[layer_id], on_cpu=True
        )
        return runtime.cpu.prefill(layer_id, hidden_states, topk_weights, topk_ids)
