"""One decode step of one MoE layer, divided between the CPU and the GPU and overlapped.

This file owns the order of the work and nothing else: it knows no driver, no cache policy and no
weight format. All shapes are fixed and nothing here reads a device value on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

# (hidden_states [T, H], topk_weights [T, K], slots int32 [T, K], all >= 0) -> float64 [T, H]
GpuExpertRunner = Callable[[Tensor, Tensor, Tensor], Tensor]

PendingT = TypeVar("PendingT")


@dataclass(frozen=True)
class HybridDecodeRequest:
    """Hidden states float32 [T, H], weights float32 [T, K] and expert ids int32 [T, K] of one
    layer. `topk_ids` is rewritten in place; padded rows have id -1 and weight 0."""

    layer_id: int
    hidden_states: Tensor
    topk_weights: Tensor
    topk_ids: Tensor


class HybridExpertCache(Protocol):
    """Which experts the GPU has."""

    def ensure_experts_hybrid(self, layer_id: int, topk_ids: Tensor) -> None:
        """Rewrite ids in place: >= 0 is a slot, -1 a route that runs on the CPU."""
        ...

    def record_stats(self, layer_id: int) -> None:
        """Count what the last call for this layer found."""
        ...

    def copy_missing(self) -> None:
        """Copy into their slots the experts that the last call gave one to."""
        ...


class HybridCpuExecutor(Protocol[PendingT]):
    """Experts on the CPU, beside the caller's work."""

    def decode_submit(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> PendingT: ...

    def decode_sync(self, pending: PendingT) -> Tensor: ...


class HybridDecodeExecutor(Generic[PendingT]):
    """Runs decode steps. With `overlap` off the CPU finishes before the GPU begins: the same
    result, for measuring."""

    def __init__(
        self,
        cache: HybridExpertCache,
        cpu: HybridCpuExecutor[PendingT],
        *,
        overlap: bool = True,
        record_stats: bool = True,
    ) -> None:
        self._cache = cache
        self._cpu = cpu
        self.overlap = overlap
        self.record_stats = record_stats

    def decode(self, request: HybridDecodeRequest, gpu_expert_runner: GpuExpertRunner) -> Tensor:
        """sum_k weights[t, k] * expert[ids[t, k]](hidden[t]): float64 [T, H]. The two partial sums
        of float32 terms add up to the same bits however the routes were divided, as long as both
        sides' kernels give a term the same bits: those of two devices do not (docs/numerics.md).

        Rewrites request.topk_ids in place (slots, or -1). Whatever is raised on the way, submitted
        CPU work has been waited for.
        """
        layer_id, hidden, topk_ids = request.layer_id, request.hidden_states, request.topk_ids
        raw_ids = topk_ids.clone()
        self._cache.ensure_experts_hybrid(layer_id, topk_ids)
        if self.record_stats:
            self._cache.record_stats(layer_id)

        on_gpu = topk_ids >= 0
        cpu_ids = raw_ids.masked_fill(on_gpu, -1)
        gpu_slots = topk_ids.clamp_min(0)
        gpu_weights = torch.where(on_gpu, request.topk_weights, 0.0)

        pending = self._cpu.decode_submit(layer_id, hidden, request.topk_weights, cpu_ids)
        if not self.overlap:
            cpu_part = self._cpu.decode_sync(pending)
            self._cache.copy_missing()
            return cpu_part + gpu_expert_runner(hidden, gpu_weights, gpu_slots)
        try:
            self._cache.copy_missing()
            gpu_part = gpu_expert_runner(hidden, gpu_weights, gpu_slots)
        finally:
            cpu_part = self._cpu.decode_sync(pending)
        return cpu_part + gpu_part
