"""What stands between gate and up of an expert or a dense feed-forward layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# act(gate) * up: "gelu" with the error function, "gelu_tanh" its tanh form, "relu2" max(gate, 0)^2
ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu2"]


@dataclass(frozen=True)
class ClampedSwiGlu:
    """c * sigmoid(alpha * c) * (d + 1), with c = min(gate, limit) and d = up within +-limit."""

    alpha: float = 1.702
    limit: float = 7.0


Activation = ActivationName | ClampedSwiGlu
