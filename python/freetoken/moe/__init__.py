"""Mixture-of-experts runtime: which expert is computed where, and when."""

from __future__ import annotations

from freetoken.moe.runtime import MoeConfig, OffloadMoeRuntime
from freetoken.moe.stats import MoeStats
from freetoken.moe.store import ExpertTensor, LayerExperts
from freetoken.moe.strategies import ExpertStrategy, make_strategy
from freetoken.telemetry import ExpertCounts

__all__ = [
    "ExpertCounts",
    "ExpertStrategy",
    "ExpertTensor",
    "LayerExperts",
    "MoeConfig",
    "MoeStats",
    "OffloadMoeRuntime",
    "make_strategy",
]
