"""What users may ask for: names, limits, and the check of each option by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from freetoken.config.sizes import PAGE_TOKENS
from freetoken.errors import ConfigError, shown

StrategyName = Literal["fused", "offload", "cpu", "hybrid"]
StrategyChoice = Literal["auto", StrategyName]
DeviceName = Literal["auto", "cpu", "cuda", "rocm"]
CpuActivations = Literal["int8", "exact"]

# What the GPU's free memory is shared with: other programs, the driver, fragmentation.
GPU_MEMORY_FRACTION = 0.9
_MOST_THREADS = 1024
_MOST = 2**31 - 1  # slots, experts or tokens: the kernels count them in 32 bits


@dataclass(frozen=True)
class EngineConfig:
    """What was asked for. None means: choose."""

    strategy: str = "auto"
    device: str = "auto"
    cache_slots: int | None = None
    max_fetch: int | None = None
    threads: int | None = None
    cpu_activations: str = "int8"
    gpu_memory_fraction: float = GPU_MEMORY_FRACTION
    kv_tokens: int | None = None

    def __post_init__(self) -> None:
        _require_choice("strategy", self.strategy, get_args(StrategyChoice))
        _require_choice("device", self.device, get_args(DeviceName))
        _require_integer("cache_slots", self.cache_slots, 1, _MOST)
        _require_integer("max_fetch", self.max_fetch, 0, _MOST)
        _require_integer("threads", self.threads, 1, _MOST_THREADS)
        _require_choice("cpu_activations", self.cpu_activations, get_args(CpuActivations))
        _require_fraction("gpu_memory_fraction", self.gpu_memory_fraction)
        _require_integer("kv_tokens", self.kv_tokens, PAGE_TOKENS, _MOST)


def _require_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} is {shown(value)}; choose one of {', '.join(allowed)}")


def _require_fraction(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError(f"{name} is {shown(value)}; it must be above 0 and at most 1")


def _require_integer(name: str, value: int | None, least: int, most: int) -> None:
    """From `least` to `most`: what is absurd is refused before anything is computed with it."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {shown(value)}; it must be an integer of at least {least}")
    if value > most:
        raise ConfigError(f"{name} is {shown(value)}; it must be at most {most}")
