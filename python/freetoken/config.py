"""Configuration: what the user asked for, and the pure function that settles the rest.

The only module that reads environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from freetoken.errors import CapacityError, ConfigError

StrategyName = Literal["fused", "offload", "cpu", "hybrid"]
StrategyChoice = Literal["auto", StrategyName]
DeviceName = Literal["auto", "cpu", "cuda"]
CpuActivations = Literal["int8", "exact"]

# Shares of the memory that is left once the weights are in: for keys and values, the rest is for
# activations, the page cache and other programs.
_KV_SHARE = 0.5
# A page is large enough to read well, and small enough that little of a last page is wasted.
_PAGE_TOKENS = 32
_MAX_RUNNING = 64
# A prefill step of this many tokens keeps all cores busy; longer prompts are cut into several.
_PREFILL_BUDGET_TOKENS = 512
# Strategies that read the mapped file: the system drops and reads pages of it as memory allows.
_MAPPED: tuple[StrategyName | None, ...] = (None, "cpu")
# What keys and values may count on then, of all memory, where the weights leave less.
_LEAST_LEFT_SHARE = 0.25
_MIB = 2**20
_MOST_THREADS = 1024


@dataclass(frozen=True)
class EngineConfig:
    """What was asked for. None means: choose."""

    strategy: str = "auto"
    device: str = "auto"
    cache_slots: int | None = None
    max_fetch: int | None = None
    threads: int | None = None
    cpu_activations: str = "int8"

    def __post_init__(self) -> None:
        _require_choice("strategy", self.strategy, get_args(StrategyChoice))
        _require_choice("device", self.device, get_args(DeviceName))
        _require_at_least("cache_slots", self.cache_slots, 1)
        _require_at_least("max_fetch", self.max_fetch, 0)
        _require_at_least("threads", self.threads, 1)
        if self.threads is not None and self.threads > _MOST_THREADS:
            raise ConfigError(f"threads is {self.threads}; it must be at most {_MOST_THREADS}")
        _require_choice("cpu_activations", self.cpu_activations, get_args(CpuActivations))


@dataclass(frozen=True)
class CheckpointFacts:
    """What resolving needs to know of a checkpoint. `experts` and `top_k` are 0 if it is dense."""

    weight_bytes: int
    expert_bytes: int
    experts: int
    top_k: int
    kv_bytes_per_token: int
    context_tokens: int


@dataclass(frozen=True)
class Hardware:
    """Memory that can be had now. `gpu_bytes` is None without a GPU that can be used."""

    memory_bytes: int
    gpu_bytes: int | None = None


@dataclass(frozen=True)
class ResolvedConfig:
    """Everything settled; nothing changes it afterwards.

    `strategy` is None for a dense model, `cache_slots` None where nothing is cached. `notes` says
    which options have no effect here.
    """

    strategy: StrategyName | None
    cache_slots: int | None
    max_fetch: int | None
    overlap: bool
    page_tokens: int
    kv_pages: int
    max_running: int
    prefill_budget_tokens: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Environment:
    """The environment variables that FreeToken knows."""

    home: Path
    overlap: bool


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """FREETOKEN_HOME (where models are kept) and FREETOKEN_HYBRID_OVERLAP (0: measure the hybrid
    strategy without overlap). ConfigError names the variable that cannot be read."""
    env = os.environ if variables is None else variables
    home = env.get("FREETOKEN_HOME", "")
    overlap = env.get("FREETOKEN_HYBRID_OVERLAP", "1").strip().lower()
    if overlap not in ("0", "1"):
        raise ConfigError(
            f"the environment variable FREETOKEN_HYBRID_OVERLAP is {overlap!r}; "
            "set it to 0 or 1, or unset it"
        )
    if home:
        return Environment(Path(home).expanduser(), overlap == "1")
    cache = Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Environment(cache / "freetoken", overlap == "1")


def resolve(
    config: EngineConfig, facts: CheckpointFacts, hardware: Hardware, *, overlap: bool = True
) -> ResolvedConfig:
    """Settle strategy, slots and memory. Pure. ConfigError for what cannot be asked of this model,
    CapacityError if it does not fit."""
    strategy = _strategy(config, facts, hardware)
    slots = _cache_slots(config, strategy, facts, hardware)
    host_bytes = _host_bytes(strategy, slots, facts)
    left_bytes = hardware.memory_bytes - host_bytes
    if strategy in _MAPPED:
        left_bytes = max(left_bytes, int(hardware.memory_bytes * _LEAST_LEFT_SHARE))
    pages = _kv_pages(facts, left_bytes, host_bytes)
    return ResolvedConfig(
        strategy=strategy,
        cache_slots=slots,
        max_fetch=config.max_fetch if strategy == "hybrid" else None,
        overlap=overlap,
        page_tokens=_PAGE_TOKENS,
        kv_pages=pages,
        max_running=_MAX_RUNNING,
        prefill_budget_tokens=_PREFILL_BUDGET_TOKENS,
        notes=(*_notes(config, strategy), *_memory_notes(strategy, facts, hardware)),
    )


def _strategy(
    config: EngineConfig, facts: CheckpointFacts, hardware: Hardware
) -> StrategyName | None:
    if facts.experts == 0:
        return None
    for name in get_args(StrategyName):
        if config.strategy == name:
            chosen: StrategyName = name
            return chosen
    if hardware.gpu_bytes is None:
        return "cpu"
    return "fused" if facts.weight_bytes <= hardware.gpu_bytes * _KV_SHARE else "hybrid"


def _cache_slots(
    config: EngineConfig,
    strategy: StrategyName | None,
    facts: CheckpointFacts,
    hardware: Hardware,
) -> int | None:
    if strategy is None or strategy == "cpu":
        return None
    wanted = config.cache_slots
    if wanted is None and hardware.gpu_bytes is not None:
        wanted = _slots_that_fit(facts, hardware.gpu_bytes, least_slots(strategy, facts.top_k))
    return resolve_slots(strategy, wanted, facts.experts, facts.top_k)


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


def _slots_that_fit(facts: CheckpointFacts, gpu_bytes: int, least: int) -> int:
    """What fits on a GPU beside the other weights."""
    slot_bytes = max(1, facts.expert_bytes // facts.experts)
    others = facts.weight_bytes - facts.expert_bytes
    fit = int((gpu_bytes * _KV_SHARE - others) // slot_bytes)
    return min(max(fit, least), facts.experts)


def _host_bytes(strategy: StrategyName | None, slots: int | None, facts: CheckpointFacts) -> int:
    """Memory that the weights take: what is read in every step has to stay in memory, mapped or
    copied. Slots lie in host memory too; of experts that were copied the mapped bytes can go."""
    if strategy is None or strategy == "cpu" or slots is None:
        return facts.weight_bytes
    others = facts.weight_bytes - facts.expert_bytes
    pool_bytes = facts.expert_bytes * slots // facts.experts
    return others + pool_bytes + (0 if strategy == "fused" else facts.expert_bytes)


def _kv_pages(facts: CheckpointFacts, left_bytes: int, weight_bytes: int) -> int:
    """Pages for keys and values, page 0 included: at most what `_MAX_RUNNING` full contexts use."""
    page_bytes = facts.kv_bytes_per_token * _PAGE_TOKENS
    most = _MAX_RUNNING * -(-facts.context_tokens // _PAGE_TOKENS)
    usable = min(most, int(left_bytes * _KV_SHARE) // page_bytes)
    if usable < 1:
        raise CapacityError(
            f"{(left_bytes + weight_bytes) / _MIB:.0f} MiB of memory are available; the weights "
            f"take {weight_bytes / _MIB:.0f} MiB, and one key-value page takes "
            f"{page_bytes / _MIB:.1f} MiB of half of what they leave; free some memory, use the "
            "cpu strategy, which copies no experts, or a smaller checkpoint"
        )
    return usable + 1


def _memory_notes(
    strategy: StrategyName | None, facts: CheckpointFacts, hardware: Hardware
) -> tuple[str, ...]:
    if strategy not in _MAPPED or facts.weight_bytes <= hardware.memory_bytes:
        return ()
    taken, available = facts.weight_bytes / _MIB, hardware.memory_bytes / _MIB
    return (
        f"the weights take {taken:.0f} MiB and {available:.0f} MiB of memory are available: some "
        "will be read from disk again and again, which is slow",
    )


def _notes(config: EngineConfig, strategy: StrategyName | None) -> tuple[str, ...]:
    notes = []
    what = "a dense model has no experts" if strategy is None else f"the strategy is {strategy}"
    if strategy is None and config.strategy != "auto":
        notes.append(f"strategy={config.strategy!r} has no effect: {what}")
    if config.cache_slots is not None and strategy not in ("offload", "hybrid"):
        notes.append(f"cache_slots={config.cache_slots} has no effect: {what}")
    if config.max_fetch is not None and strategy != "hybrid":
        notes.append(f"max_fetch={config.max_fetch} has no effect: {what}")
    return tuple(notes)


def _require_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")


def _require_at_least(name: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {least}")
