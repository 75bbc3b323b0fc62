"""Slots per layer that a strategy needs, and those that it gets."""

from __future__ import annotations

from freetoken.config.options import StrategyName
from freetoken.errors import ConfigError

# Strategies whose experts lie in host memory, packed, and pass through slots on the device.
CACHED: tuple[StrategyName | None, ...] = ("offload", "hybrid")


def least_slots(strategy: StrategyName, top_k: int) -> int:
    """Slots per layer without which a strategy cannot run."""
    return top_k if strategy == "offload" else 1


def resolve_slots(strategy: StrategyName, wanted: int | None, experts: int, top_k: int) -> int:
    """Slots per layer of `experts` experts. Whatever is wanted, fused has one per expert and cpu
    none; wanted None: half of the experts. Raises ConfigError naming the range that would do."""
    if strategy == "cpu":
        return 0
    if strategy == "fused":
        return experts
    least = least_slots(strategy, top_k)
    if wanted is None:
        return max(least, -(-experts // 2))
    if not least <= wanted <= experts:
        raise ConfigError(
            f"cache_slots is {wanted}; the strategy {strategy} needs {least} to {experts} slots "
            f"per layer with this model ({experts} experts, {top_k} per token)"
        )
    return wanted
