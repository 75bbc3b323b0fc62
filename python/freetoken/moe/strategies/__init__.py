"""The table of expert strategies."""

from __future__ import annotations

from collections.abc import Callable

from freetoken.moe.runtime import OffloadMoeRuntime
from freetoken.moe.strategies.base import ExpertStrategy
from freetoken.moe.strategies.cpu import CpuStrategy
from freetoken.moe.strategies.fused import FusedStrategy
from freetoken.moe.strategies.hybrid import HybridStrategy
from freetoken.moe.strategies.offload import OffloadStrategy

STRATEGIES: dict[str, Callable[[OffloadMoeRuntime], ExpertStrategy]] = {
    "cpu": CpuStrategy,
    "fused": FusedStrategy,
    "hybrid": HybridStrategy,
    "offload": OffloadStrategy,
}


def make_strategy(runtime: OffloadMoeRuntime) -> ExpertStrategy:
    """The strategy that the runtime was created for."""
    return STRATEGIES[runtime.config.strategy](runtime)


__all__ = ["STRATEGIES", "ExpertStrategy", "make_strategy"]
