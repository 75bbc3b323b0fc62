"""Configuration: what the user asked for, and the pure function that settles the rest.

The only module that reads environment variables.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from freetoken.errors import CapacityError, ConfigError, shown
from freetoken.gpu_budget import DecoderSizes, GpuNeeds, decode_bytes, divide, prefill_bytes

StrategyName = Literal["fused", "offload", "cpu", "hybrid"]
StrategyChoice = Literal["auto", StrategyName]
DeviceName = Literal["auto", "cpu", "cuda", "rocm"]
CpuActivations = Literal["int8", "exact"]

# Shares of the memory that is left once the weights are in: for keys and values, the rest is for
# activations, the page cache and other programs.
_KV_SHARE = 0.5
# A page is large enough to read well, and small enough that little of a last page is wasted.
PAGE_TOKENS = 32
_MAX_RUNNING = 64
# A prefill step of this many tokens keeps all cores busy; longer prompts are cut into several.
_PREFILL_BUDGET_TOKENS = 512
# On a GPU a step may bring every expert over the bus, whatever its tokens: fewer, longer steps.
_GPU_PREFILL_BUDGET_TOKENS = 2048
# What the GPU's free memory is shared with: other programs, the driver, fragmentation.
GPU_MEMORY_FRACTION = 0.9
# A conversation of this length fits beside the experts, whatever else has to make room.
_LEAST_KV_TOKENS = 4096
# Strategies that read the mapped file: the system drops and reads pages of it as memory allows.
_MAPPED: tuple[StrategyName | None, ...] = (None, "cpu")
# What keys and values may count on then, of all memory, where the weights leave less.
_LEAST_LEFT_SHARE = 0.25
# Strategies whose experts lie in host memory, packed, and pass through slots on the device.
_CACHED: tuple[StrategyName | None, ...] = ("offload", "hybrid")
# Those that take less of a GPU.
_SMALLER: dict[StrategyName | None, tuple[StrategyName, ...]] = {
    "fused": ("hybrid", "cpu"),
    "offload": ("hybrid", "cpu"),
    "hybrid": ("cpu",),
}
_MIB, _GIB = 2**20, 2**30
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


@dataclass(frozen=True)
class CheckpointFacts:
    """What resolving needs to know of a checkpoint. `experts` and `top_k` are 0 if it is dense.

    As records, packed: `slot_bytes` is one expert of every layer, `largest_layer_bytes` all
    experts of the layer that takes most. `sizes` are what activations grow with.
    """

    weight_bytes: int
    expert_bytes: int
    experts: int
    top_k: int
    kv_bytes_per_token: int
    context_tokens: int
    slot_bytes: int
    largest_layer_bytes: int
    sizes: DecoderSizes


@dataclass(frozen=True)
class Hardware:
    """Memory that can be had now.

    `gpu_bytes` are free on the GPU that is used; None: none is.
    `pinnable_bytes` of host memory may be pinned for it. `memlock_bytes` is the limit that the
    process has on locked memory (None: none); drivers that pin memory rarely ask for it.
    """

    memory_bytes: int
    gpu_bytes: int | None = None
    pinnable_bytes: int | None = None
    memlock_bytes: int | None = None


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
        return Environment(_home(home), overlap == "1")
    cache = Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Environment(cache / "freetoken", overlap == "1")


def _home(value: str) -> Path:
    """Absolute, so that it is the same folder wherever a command is started."""
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:
        raise _wrong_home(value, str(error)) from error
    if not path.is_absolute():
        raise _wrong_home(value, f"a relative path; did you mean {path.absolute()}?")
    return path


def models_folder() -> Path:
    """Where FreeToken keeps models; it may not exist yet. ConfigError if it cannot."""
    home = read_environment().home
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(home).st_mode):
                raise _wrong_home(str(home), "a file")
    except OSError as error:
        raise _wrong_home(str(home), error.strerror or str(error)) from error
    return home / "models"


def _wrong_home(value: str, found: str) -> ConfigError:
    return ConfigError(
        f"models cannot be kept in FREETOKEN_HOME, {value[:200]!r}\n"
        f"  found:    {found}\n"
        "  expected: the absolute path of a folder, or one that can be made\n"
        "  what to do: set FREETOKEN_HOME to another folder, or unset it"
    )


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
        tokens = _PREFILL_BUDGET_TOKENS
        strategy = _strategy(config, facts) or ("cpu" if facts.experts else None)
        slots = _host_slots(config, strategy, facts)
        pages = _host_pages(config, strategy, slots, facts, hardware)
    else:
        tokens = _GPU_PREFILL_BUDGET_TOKENS
        room = _GpuRoom(config, facts, hardware.gpu_bytes, headroom_bytes)
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
        max_running=_MAX_RUNNING,
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


def _pages_for(tokens: int) -> int:
    """Page 0, which is nobody's, included."""
    return -(-tokens // PAGE_TOKENS) + 1


def _most_pages(facts: CheckpointFacts) -> int:
    """What `_MAX_RUNNING` full contexts use."""
    return _MAX_RUNNING * (_pages_for(facts.context_tokens) - 1) + 1


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
    left_bytes = hardware.memory_bytes - weight_bytes
    if strategy in _MAPPED:
        left_bytes = max(left_bytes, int(hardware.memory_bytes * _LEAST_LEFT_SHARE))
    page_bytes = facts.kv_bytes_per_token * PAGE_TOKENS
    if config.kv_tokens is not None:
        pages = _pages_for(config.kv_tokens)
        if pages * page_bytes > left_bytes:
            fits = (left_bytes // page_bytes - 1) * PAGE_TOKENS
            raise CapacityError(
                f"keys and values of {config.kv_tokens} tokens take {size(pages * page_bytes)}, "
                f"and the weights leave {size(max(0, left_bytes))} of "
                f"{size(hardware.memory_bytes)} of memory; free some memory"
                + (f", or use --kv-tokens {fits}, which would fit" if fits > 0 else "")
            )
        return pages
    usable = min(_most_pages(facts) - 1, int(left_bytes * _KV_SHARE) // page_bytes)
    if usable < 1:
        raise CapacityError(
            f"{size(hardware.memory_bytes)} of memory are available; the weights take "
            f"{size(weight_bytes)}, and one key-value page takes {size(page_bytes)} of half of "
            "what they leave; free some memory, use the cpu strategy, which copies no experts, or "
            "a smaller checkpoint"
        )
    return usable + 1


@dataclass(frozen=True)
class _GpuRoom:
    """What fits on a GPU of which `free_bytes` are free."""

    config: EngineConfig
    facts: CheckpointFacts
    free_bytes: int
    headroom_bytes: int | None

    @property
    def budget_bytes(self) -> int:
        return int(self.free_bytes * self.config.gpu_memory_fraction)

    def auto_strategy(self) -> StrategyName | None:
        """Of a MoE model: fused if everything fits."""
        if self.facts.experts == 0:
            return None
        return "fused" if divide(self.needs("fused"), self.budget_bytes) else "hybrid"

    def divided(self, strategy: StrategyName | None) -> tuple[int | None, int]:
        """Slots per layer (None where there are none) and pages."""
        needs = self.needs(strategy)
        shares = divide(needs, self.budget_bytes)
        if shares is None:
            raise CapacityError(self._too_little(strategy, needs))
        return (shares.slots if needs.slot_bytes else None), shares.pages

    def needs(self, strategy: StrategyName | None) -> GpuNeeds:
        """Raises ConfigError for slots that the strategy cannot have."""
        config, facts = self.config, self.facts
        least = most = 0
        if strategy is not None and strategy in _CACHED:
            least, most = least_slots(strategy, facts.top_k), facts.experts
            if config.cache_slots is not None:
                least = most = resolve_slots(
                    strategy, config.cache_slots, facts.experts, facts.top_k
                )
        elif strategy == "fused":
            least = most = facts.experts
        least_tokens = min(facts.context_tokens, _LEAST_KV_TOKENS)
        least_pages, most_pages = _pages_for(least_tokens), _most_pages(facts)
        if config.kv_tokens is not None:
            least_pages = most_pages = _pages_for(config.kv_tokens)
        prefill = self.headroom_bytes
        if prefill is None:
            prefill = prefill_bytes(facts.sizes, _GPU_PREFILL_BUDGET_TOKENS, _MAX_RUNNING)
        return GpuNeeds(
            weight_bytes=facts.weight_bytes - facts.expert_bytes,
            activation_bytes=prefill + decode_bytes(facts.sizes, _MAX_RUNNING),
            buffer_bytes=2 * facts.largest_layer_bytes if strategy in _CACHED else 0,
            slot_bytes=facts.slot_bytes if most else 0,
            least_slots=least,
            most_slots=most,
            page_bytes=facts.kv_bytes_per_token * PAGE_TOKENS,
            least_pages=least_pages,
            most_pages=most_pages,
        )

    def _too_little(self, strategy: StrategyName | None, needs: GpuNeeds) -> str:
        tokens = (needs.least_pages - 1) * PAGE_TOKENS
        takes = [
            (needs.weight_bytes, "weights"),
            (needs.activation_bytes, "activations"),
            (needs.buffer_bytes, "two layers of experts in prefill"),
            (needs.slots_bytes, f"{needs.least_slots} expert slots per layer"),
            (needs.cache_bytes, f"keys and values of {tokens} tokens"),
        ]
        parts = ", ".join(f"{size(taken)} for {what}" for taken, what in takes if taken)
        what = "the model" if strategy is None else f"the strategy {strategy}"
        return (
            f"{size(self.free_bytes)} of GPU memory are free, of which "
            f"{size(self.budget_bytes)} may be used (gpu_memory_fraction "
            f"{self.config.gpu_memory_fraction:g}); {what} needs at least "
            f"{size(needs.total_bytes)}: {parts}. This would fit: "
            f"{', or '.join(self._what_would_fit(strategy, needs))}"
        )

    def _what_would_fit(self, strategy: StrategyName | None, needs: GpuNeeds) -> Iterator[str]:
        """Single options that would, beside the others as they are."""
        left = self.budget_bytes - needs.total_bytes
        if strategy is not None and strategy in _CACHED:
            slots = (left + needs.slots_bytes) // needs.slot_bytes
            if slots >= least_slots(strategy, self.facts.top_k):
                yield f"--cache-slots {slots}"
        pages = (left + needs.cache_bytes) // needs.page_bytes
        if pages > 1:
            yield f"--kv-tokens {(pages - 1) * PAGE_TOKENS}"
        if needs.total_bytes <= self.free_bytes:
            fraction = math.ceil(needs.total_bytes * 100 / self.free_bytes) / 100
            if int(self.free_bytes * fraction) >= needs.total_bytes:
                yield f"--gpu-memory-fraction {fraction:g}"
        for other in _SMALLER.get(strategy, ()):
            with contextlib.suppress(ConfigError):  # slots that the other cannot have
                if divide(self.needs(other), self.budget_bytes):
                    yield f"--strategy {other}"
        yield "--device cpu"


def _check_host_memory(
    strategy: StrategyName | None, facts: CheckpointFacts, hardware: Hardware
) -> None:
    """Raises CapacityError if the host cannot hold the experts that the GPU fetches."""
    packed_bytes = facts.slot_bytes * facts.experts
    if strategy in _CACHED and packed_bytes > hardware.memory_bytes:
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
    if config.cache_slots is not None and strategy not in _CACHED:
        notes.append(f"cache_slots={config.cache_slots} has no effect: {what}")
    if config.max_fetch is not None and strategy != "hybrid":
        notes.append(f"max_fetch={config.max_fetch} has no effect: {what}")
    fraction = config.gpu_memory_fraction
    if fraction != GPU_MEMORY_FRACTION and hardware.gpu_bytes is None:
        notes.append(f"gpu_memory_fraction={fraction:g} has no effect: no GPU is used")
    return tuple(notes)


def size(size_bytes: int) -> str:
    """For messages: "5.25 GiB", or "300.0 MiB"."""
    if size_bytes >= _GIB:
        return f"{size_bytes / _GIB:.2f} GiB"
    return f"{size_bytes / _MIB:.1f} MiB"


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
