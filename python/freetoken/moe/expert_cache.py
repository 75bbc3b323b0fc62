"""The contract of a cache of hot experts, whether its bookkeeping lies on the host or on a GPU."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from freetoken.moe.stats import StepCounter
from freetoken.moe.waves import split_experts, split_tokens
from freetoken.telemetry import ExpertCounts

CounterT = TypeVar("CounterT", bound=StepCounter, contravariant=True)


class AdjustableCap(Protocol):
    """How many misses of a call may be fetched, as in freetoken.moe.lru.FetchCap."""

    @property
    def is_fraction(self) -> bool: ...

    def set(self, value: int) -> None:
        """Change it for the calls to come, in replays of a graph too. Raises ConfigError for a
        value out of range."""
        ...


class ExpertCache(Protocol[CounterT]):
    """Which experts have slots; a step is an `ensure` call, then `copy_missing`, for one layer at a
    time. A fetch that a failed step has left uncopied is undone: no later call believes it."""

    @property
    def slots(self) -> int:
        """Slots per layer."""
        ...

    @property
    def cap(self) -> AdjustableCap: ...

    def ensure_experts(self, layer_id: int, topk_ids: Tensor) -> None:
        """Rewrite ids int32 [T, K] in place to slots; every miss is fetched. -1 stays -1.

        Raises CapacityError, and changes no expert's place, if the distinct experts exceed the
        slots.
        """
        ...

    def ensure_experts_hybrid(self, layer_id: int, topk_ids: Tensor) -> None:
        """Rewrite ids int32 [T, K] in place to slots, or to -1 for routes that the CPU computes.

        At most `cap` misses are fetched.
        """
        ...

    def token_runs(self, topk_ids: Tensor) -> list[slice]:
        """Runs of tokens of ids [T, K] whose experts fit the slots together. The ids are read on
        the host only where more could be asked for than there are slots."""
        ...

    def copy_missing(self) -> None:
        """Fill the slots that the last call assigned."""
        ...

    def record_stats(self, layer_id: int) -> None:
        """Count the layer's last ensure call as one decode step."""
        ...

    def record_into(self, counter: CounterT, layer_id: int, *, steps: int = 1) -> None:
        """Add what the layer's last ensure call found to another counter; steps=0: as a further
        wave of the same step."""
        ...

    def stats(self) -> tuple[ExpertCounts, ...]:
        """Decode counts of each layer."""
        ...

    def resident(self, layer_id: int) -> dict[int, int]:
        """Slot of each expert of a layer that has one."""
        ...

    def check_integrity(self, *, contents: bool = False) -> None:
        """Raise RuntimeError naming a broken invariant; with `contents` also compare every filled
        slot with its expert's record."""
        ...


def token_runs(topk_ids: Tensor, slots: int) -> list[slice]:
    """ExpertCache.token_runs for that many slots."""
    if topk_ids.numel() <= slots:
        return [slice(0, len(topk_ids))]
    return split_tokens(topk_ids.cpu().numpy(), slots)


def expert_waves(topk_ids: Tensor, slots: int, resident: Collection[int]) -> list[Tensor]:
    """Masks bool [T, K] of the routes of each wave of at most as many experts as slots, those of
    `resident` first. Reads the ids on the host."""
    waves = split_experts(topk_ids.cpu().numpy(), slots, resident)
    return [torch.from_numpy(routes).to(topk_ids.device) for routes in waves]
