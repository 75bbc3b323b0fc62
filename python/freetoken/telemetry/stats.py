"""The numbers of a report: times, expert counts, and what the configuration resolved to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds and tokens since the last reset; `load_s` is of the whole life.

    `prefill_tokens` are prompt tokens computed, `decode_tokens` tokens computed one per sequence.
    A completion of n tokens takes n - 1 decode steps: its first token comes out of the prefill.
    """

    load_s: float
    prefill_s: float
    decode_s: float
    prefill_tokens: int
    decode_tokens: int

    @property
    def prefill_tokens_per_s(self) -> float:
        """0.0 while nothing was computed."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """0.0 while nothing was computed."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True)
class ExpertCounts:
    """Experts asked for, in steps of one layer or of the whole model.

    `active` counts the distinct experts of each step (an expert that a step looks up in several
    waves counts once for each). Always: active = hits + misses, misses = fetched + cpu.
    """

    steps: int = 0
    active: int = 0
    hits: int = 0
    misses: int = 0
    fetched: int = 0
    cpu: int = 0


@dataclass(frozen=True)
class ConfigReport:
    """What the options resolved to on this machine and for this checkpoint.

    `slots`: cache slots per layer, None where nothing is cached. `format`: of the experts, or of
    the largest matrices of a dense model. `isa`: what the kernels were compiled for. `kv_tokens`:
    what the key-value cache holds, over all requests. `gpu_memory_fraction`: None without a GPU.
    `unpinned_layers`: MoE layers whose experts a GPU cannot read where they lie.
    """

    model: str
    family: str
    strategy: str
    device: str
    slots: int | None
    experts: int
    top_k: int
    format: str
    threads: int
    isa: str
    max_fetch: int | None
    context_tokens: int
    kv_pages: int
    page_tokens: int
    kv_tokens: int
    gpu_memory_fraction: float | None
    unpinned_layers: int


@dataclass(frozen=True)
class Stats:
    """Everything that `LLM.stats()` reports."""

    timing: Timing
    experts: ExpertCounts
    config: ConfigReport


@dataclass
class StepTimer:
    """Adds up steps of the two phases."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0

    def add_prefill(self, seconds: float, tokens: int) -> None:
        self.prefill_s += seconds
        self.prefill_tokens += tokens

    def add_decode(self, seconds: float, tokens: int) -> None:
        self.decode_s += seconds
        self.decode_tokens += tokens

    def timing(self, load_s: float) -> Timing:
        return Timing(
            load_s=load_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
        )
