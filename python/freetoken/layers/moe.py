"""A mixture-of-experts layer: router, top-k, and the experts on slots as a callback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from freetoken.kernels.base import ExpertMath, Ops
from freetoken.layers.linear import Linear
from freetoken.moe.phase import Phase
from freetoken.moe.strategies.base import ExpertStrategy

if TYPE_CHECKING:
    from freetoken.models.spec import MoeSpec


class OffloadMoELayer:
    """Routes each token to top_k experts and leaves to the strategy where they are computed.

    All that the layer adds to the strategy is the math of the experts on slots: `expert_kernel`,
    bound to the layer's slots (None where the strategy has no slots).
    """

    def __init__(
        self,
        layer_id: int,
        router: Linear,
        moe: MoeSpec,
        ops: Ops,
        strategy: ExpertStrategy,
        expert_kernel: ExpertMath | None,
    ) -> None:
        self._layer_id = layer_id
        self._router = router
        self._moe = moe
        self._ops = ops
        self._strategy = strategy
        if expert_kernel is not None:  # itself, not a method: a cycle would outlive the model
            strategy.register(layer_id, expert_kernel)

    def forward(self, x: Tensor, phase: Phase, padded: Tensor | None = None) -> Tensor:
        """x float32 [T, H] -> float32 [T, H]: here the sum over experts is rounded. `padded`
        bool [T] marks rows that are nobody's: they ask for no expert and come out zero."""
        logits = self._router(x)
        weights, ids = self._ops.route_topk(
            logits, self._moe.top_k, renormalize=self._moe.renormalize
        )
        if padded is not None:
            weights = weights.masked_fill(padded[:, None], 0.0)
            ids = ids.masked_fill(padded[:, None], -1)
        run = self._strategy.decode if phase is Phase.DECODE else self._strategy.prefill
        return self._ops.to_float32(run(self._layer_id, x, weights, ids))
