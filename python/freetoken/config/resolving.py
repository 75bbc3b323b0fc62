"""The pure function that settles whatever the user left open."""

from __future__ import annotations

from typing import get_args

from freetoken.config import steps
from freetoken.config.facts import CheckpointFacts, Hardware, ResolvedConfig
from freetoken.config.gpu_room import GpuRoom
from freetoken.config.options import GPU_MEMORY_FRACTION, EngineConfig, StrategyName
from freetoken.config.sizes import PAGE_TOKENS, pages_for, size
from freetoken.config.slots import CACHED, resolve_slots
from freetoken.config.steps import useful_pages
from freetoken.errors import CapacityError

# Shares of the memory that is left once the weights are in: for keys and values, the rest is for
# activations, the page cache and other programs.
_KV_SHARE = 0.5
# Strategies that read the mapped file: the system drops and reads pages of it as memory allows.
_MAPPED: tuple[StrategyName | None, ...] = (None, "cpu")
# What keys and values may count on then, of all memory, where the weights leave less.
_LEAST_LEFT_SHARE = 0.25


def resolve(
    config: EngineConfig,
    facts: CheckpointFacts,
    hardware: Hardware,
    *,
    overlap: bool = True,
    headroom_bytes: int | None = None,
) -> ResolvedConfig:
    """Settle strategy, slots and memory. Pure. ConfigError for what cannot be asked of this model,
    CapacityError if it does not fit. `headroom_bytes`: what a prefill step was measured to take on
    the GPU beside weights and cache; None: an upper bound on it is computed."""
    if hardware.gpu_bytes is None:
        tokens = steps.PREFILL_BUDGET_TOKENS
        strategy = _strategy(config, facts) or ("cpu" if facts.experts else None)
        slots = _host_slots(config, strategy, facts)
        pages = _host_pages(config, strategy, slots, facts, hardware)
    else:
        tokens = steps.GPU_PREFILL_BUDGET_TOKENS
        room = GpuRoom(config, facts, hardware.gpu_bytes, headroom_bytes)
        strategy = _strategy(config, facts) or room.auto_strategy()
        slots, pages = room.divided(strategy)
        _check_host_memory(strategy, facts, hardware)
    return ResolvedConfig(
        strategy=strategy,
        cache_slots=slots,
        max_fetch=config.max_fetch if strategy == "hybrid" else None,
        overlap=overlap,
        page_tokens=PAGE_TOKENS,
        kv_pages=pages,
        max_running=steps.MAX_RUNNING,
        prefill_budget_tokens=tokens,
        notes=(*_notes(config, strategy, hardware), *_memory_notes(strategy, facts, hardware)),
    )


def _strategy(config: EngineConfig, facts: CheckpointFacts) -> StrategyName | None:
    """The one that was asked for; None: auto, or a dense model, which has none."""
    if facts.experts == 0:
        return None
    for name in get_args(StrategyName):
        if config.strategy == name:
            chosen: StrategyName = name
            return chosen
    return None


def _host_slots(
    config: EngineConfig, strategy: StrategyName | None, facts: CheckpointFacts
) -> int | None:
    if strategy is None or strategy == "cpu":
        return None
    return resolve_slots(strategy, config.cache_slots, facts.experts, facts.top_k)


def _host_bytes(strategy: StrategyName | None, slots: int | None, facts: CheckpointFacts) -> int:
    """Memory that the weights take: what is read in every step has to stay in memory, mapped or
    copied. Slots lie in host memory too; of experts that were copied the mapped bytes can go."""
    if strategy is None or strategy == "cpu" or slots is None:
        return facts.weight_bytes
    others = facts.weight_bytes - facts.expert_bytes
    pool_bytes = facts.expert_bytes * slots // facts.experts
    return others + pool_bytes + (0 if strategy == "fused" else facts.expert_bytes)


def _host_pages(
    config: EngineConfig,
    strategy: StrategyName | None,
    slots: int | None,
    facts: CheckpointFacts,
    hardware: Hardware,
) -> int:
    """Pages of the key-value cache where it lies in host memory: as asked, else a share of what
    the weights leave."""
    weight_bytes = _host_bytes(strategy, slots, facts)
    left_bytes = max(0, hardware.memory_bytes - weight_bytes)
    room = f"the weights leave {size(left_bytes)}"
    least_bytes = int(hardware.memory_bytes * _LEAST_LEFT_SHARE)
    if strategy in _MAPPED and left_bytes < least_bytes:
        left_bytes = least_bytes
        room = f"beside the weights, which are mapped, they may take {size(left_bytes)}"
    page_bytes = facts.kv_bytes_per_token * PAGE_TOKENS
    if config.kv_tokens is not None:
        pages = pages_for(config.kv_tokens)
        if pages * page_bytes > left_bytes:
            fits = (left_bytes // page_bytes - 1) * PAGE_TOKENS
            raise CapacityError(
                f"keys and values of {config.kv_tokens} tokens take {size(pages * page_bytes)}, "
                f"and {room} of {size(hardware.memory_bytes)} of memory; free some memory"
                + (f", or use --kv-tokens {fits}, which would fit" if fits > 0 else "")
            )
        return pages
    usable = min(useful_pages(facts) - 1, int(left_bytes * _KV_SHARE) // page_bytes)
    if usable < 1:
        raise CapacityError(
            f"{size(hardware.memory_bytes)} of memory are available; the weights take "
            f"{size(weight_bytes)}, and one key-value page takes {size(page_bytes)} of half of "
            "what they leave; free some memory, use the cpu strategy, which copies no experts, or "
            "a smaller checkpoint"
        )
    return usable + 1


def _check_host_memory(
    strategy: StrategyName | None, facts: CheckpointFacts, hardware: Hardware
) -> None:
    """Raises CapacityError if the host cannot hold the experts that the GPU fetches."""
    packed_bytes = facts.slot_bytes * facts.experts
    if strategy in CACHED and packed_bytes > hardware.memory_bytes:
        raise CapacityError(
            f"the strategy {strategy} holds all experts in host memory, which takes "
            f"{size(packed_bytes)}, and {size(hardware.memory_bytes)} are available; free some "
            "memory, or use --strategy cpu, which reads them where the file is mapped"
        )


def _memory_notes(
    strategy: StrategyName | None, facts: CheckpointFacts, hardware: Hardware
) -> tuple[str, ...]:
    on_host = facts.weight_bytes
    if hardware.gpu_bytes is not None:
        on_host = facts.expert_bytes if strategy == "cpu" else 0
    if strategy not in _MAPPED or on_host <= hardware.memory_bytes:
        return ()
    return (
        f"the weights take {size(on_host)} and {size(hardware.memory_bytes)} of memory are "
        "available: some will be read from disk again and again, which is slow",
    )


def _notes(
    config: EngineConfig, strategy: StrategyName | None, hardware: Hardware
) -> tuple[str, ...]:
    notes = []
    what = "a dense model has no experts" if strategy is None else f"the strategy is {strategy}"
    if strategy is None and config.strategy != "auto":
        notes.append(f"strategy={config.strategy!r} has no effect: {what}")
    if config.cache_slots is not None and strategy not in CACHED:
        notes.append(f"cache_slots={config.cache_slots} has no effect: {what}")
    if config.max_fetch is not None and strategy != "hybrid":
        notes.append(f"max_fetch={config.max_fetch} has no effect: {what}")
    fraction = config.gpu_memory_fraction
    if fraction != GPU_MEMORY_FRACTION and hardware.gpu_bytes is None:
        notes.append(f"gpu_memory_fraction={fraction:g} has no effect: no GPU is used")
    return tuple(notes)
