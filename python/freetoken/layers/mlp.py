"""The dense gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels.activations import Activation
from freetoken.kernels.base import Ops
from freetoken.layers.linear import Linear, LinearGroup
from freetoken.moe.phase import Phase


class GatedMlp:
    """down(act(gate(x)) * up(x)), [T, H] -> [T, H]."""

    def __init__(
        self, ops: Ops, *, gate: Linear, up: Linear, down: Linear, activation: Activation
    ) -> None:
        self._ops = ops
        self._gate_up = LinearGroup(ops, gate, up)
        self._down = down
        self._activation = activation

    def forward(self, x: Tensor, phase: Phase, padded: Tensor | None = None) -> Tensor:
        """Called as a MoE layer is; every step and row is computed alike."""
        gate, up = self._gate_up(x)
        return self._down(self._ops.gated_activation(gate, up, self._activation))
