"""The contract of an expert strategy: who computes which expert."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from freetoken.moe.hybrid_decode import GpuExpertRunner


class ExpertStrategy(Protocol):
    """Computes sum_k weights[t, k] * expert[ids[t, k]](hidden[t]) for one layer at a time.

    hidden_states float32 [T, H], topk_weights float32 [T, K], topk_ids int32 [T, K] contiguous;
    returns float64 [T, H]. Where one device's kernels compute all of it, every strategy gives the
    same bits; docs/numerics.md says what else holds on a GPU. A padded row has id -1 and weight 0
    in all K. The ids belong to the strategy from the call on: it may rewrite them in place.
    """

    def register(self, layer_id: int, runner: GpuExpertRunner) -> None:
        """Give the layer's GPU expert callback. Once per layer, before its first call."""
        ...

    def decode(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """One token of each sequence."""
        ...

    def prefill(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """Many tokens of each sequence."""
        ...


class RunnerTable:
    """The GPU expert callbacks of all layers."""

    def __init__(self) -> None:
        self._runners: dict[int, GpuExpertRunner] = {}

    def register(self, layer_id: int, runner: GpuExpertRunner) -> None:
        """Raises RuntimeError if the layer has one."""
        if layer_id in self._runners:
            raise RuntimeError(f"MoE layer {layer_id} has registered its experts before")
        self._runners[layer_id] = runner

    def __getitem__(self, layer_id: int) -> GpuExpertRunner:
        try:
            return self._runners[layer_id]
        except KeyError:
            raise RuntimeError(
                f"MoE layer {layer_id} has not registered its experts; registered: "
                f"{sorted(self._runners)}"
            ) from None
