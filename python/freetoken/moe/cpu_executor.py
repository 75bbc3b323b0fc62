"""Experts on the CPU's worker pool, started by one call and collected by another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from freetoken.kernels.base import ExpertKernel, PendingExperts


class PendingDecode:
    """CPU work under way. Belongs to the executor that made it, which syncs it exactly once."""

    __slots__ = ("work",)

    def __init__(self, work: PendingExperts) -> None:
        self.work = work


class CpuMoeExecutor:
    """Runs the experts of any layer on the CPU. `kernels` has one bound kernel per MoE layer.

    Shapes as in ExpertKernel: hidden_states float32 [T, H], topk_weights float32 [T, K],
    topk_ids int32 [T, K] where -1 is skipped; results are float64 [T, H].
    """

    def __init__(self, kernels: Sequence[ExpertKernel]) -> None:
        self._kernels = tuple(kernels)
        self._pending: set[PendingDecode] = set()

    def decode_submit(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> PendingDecode:
        """Start the work on the pool's threads and return at once.

        The tensors must stay as they are until `decode_sync`. If this raises, nothing is pending.
        """
        pending = PendingDecode(
            self._kernels[layer_id].submit(hidden_states, topk_weights, topk_ids)
        )
        self._pending.add(pending)
        return pending

    def decode_sync(self, pending: PendingDecode) -> Tensor:
        """Wait for the work and return its result. It is pending no more, also if this raises.

        Raises RuntimeError for work that was synced before or that is another executor's.
        """
        if pending not in self._pending:
            raise RuntimeError(
                "this CPU work is not pending here; each decode_submit is synced exactly once"
            )
        self._pending.remove(pending)
        return pending.work.wait()

    def decode(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """The same in one call; the calling thread takes part in the work."""
        return self._kernels[layer_id](hidden_states, topk_weights, topk_ids)

    def prefill(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """The same for many tokens."""
        return self.decode(layer_id, hidden_states, topk_weights, topk_ids)

    @property
    def pending(self) -> int:
        """How many submitted works wait for their sync."""
        return len(self._pending)

    def close(self) -> None:
        """Wait for whatever is pending and drop the kernels. Call once."""
        while self._pending:
            self.decode_sync(next(iter(self._pending)))
        self._kernels = ()
