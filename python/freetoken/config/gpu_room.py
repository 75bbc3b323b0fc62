"""What of a model fits on a GPU, and what would."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from freetoken.config.facts import CheckpointFacts
from freetoken.config.options import EngineConfig, StrategyName
from freetoken.config.sizes import PAGE_TOKENS, pages_for, size
from freetoken.config.slots import CACHED, least_slots, resolve_slots
from freetoken.config.steps import GPU_PREFILL_BUDGET_TOKENS, MAX_RUNNING, useful_pages
from freetoken.errors import CapacityError, ConfigError
from freetoken.gpu_budget import GpuNeeds, decode_bytes, divide, prefill_bytes

# A conversation of this length fits beside the experts, whatever else has to make room.
_LEAST_KV_TOKENS = 4096
# Strategies that take less of a GPU.
_SMALLER: dict[StrategyName | None, tuple[StrategyName, ...]] = {
    "fused": ("hybrid", "cpu"),
    "offload": ("hybrid", "cpu"),
    "hybrid": ("cpu",),
}


@dataclass(frozen=True)
class GpuRoom:
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
        if strategy is not None and strategy in CACHED:
            least, most = least_slots(strategy, facts.top_k), facts.experts
            if config.cache_slots is not None:
                least = most = resolve_slots(
                    strategy, config.cache_slots, facts.experts, facts.top_k
                )
        elif strategy == "fused":
            least = most = facts.experts
        least_tokens = min(facts.context_tokens, _LEAST_KV_TOKENS)
        least_pages, most_pages = pages_for(least_tokens), useful_pages(facts)
        if config.kv_tokens is not None:
            least_pages = most_pages = pages_for(config.kv_tokens)
        prefill = self.headroom_bytes
        if prefill is None:
            prefill = prefill_bytes(facts.sizes, GPU_PREFILL_BUDGET_TOKENS, MAX_RUNNING)
        return GpuNeeds(
            weight_bytes=facts.weight_bytes - facts.expert_bytes,
            activation_bytes=prefill + decode_bytes(facts.sizes, MAX_RUNNING),
            buffer_bytes=2 * facts.largest_layer_bytes if strategy in CACHED else 0,
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
        if strategy is not None and strategy in CACHED:
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
