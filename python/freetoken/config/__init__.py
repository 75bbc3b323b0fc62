"""Configuration: what the user asked for, and the pure function that settles the rest."""

from freetoken.config.environment import Environment, models_folder, read_environment
from freetoken.config.facts import CheckpointFacts, Hardware, ResolvedConfig
from freetoken.config.options import (
    GPU_MEMORY_FRACTION,
    CpuActivations,
    DeviceName,
    EngineConfig,
    StrategyChoice,
    StrategyName,
)
from freetoken.config.resolving import resolve
from freetoken.config.sizes import PAGE_TOKENS, size
from freetoken.config.slots import least_slots, resolve_slots

__all__ = [
    "GPU_MEMORY_FRACTION",
    "PAGE_TOKENS",
    "CheckpointFacts",
    "CpuActivations",
    "DeviceName",
    "EngineConfig",
    "Environment",
    "Hardware",
    "ResolvedConfig",
    "StrategyChoice",
    "StrategyName",
    "least_slots",
    "models_folder",
    "read_environment",
    "resolve",
    "resolve_slots",
    "size",
]
