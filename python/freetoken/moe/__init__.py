"""Mixture-of-experts runtime: which expert is computed where, and when."""

from __future__ import annotations

from freetoken.moe.runtime import MoeConfig, OffloadMoeRuntime
from freetoken.moe.stats import MoeStats
from freetoken.moe.store import ExpertTensor, LayerExperts
from freetoken.moe.strategies import ExpertStrategy, make_strategy

__all__ = [
    "ExpertStrategy",
    "ExpertTensor",
    "LayerExperts",
    "MoeConfig",
    "MoeStats",
    "OffloadMoeRuntime",
    "make_strategy",
]
