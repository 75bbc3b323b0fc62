"""The cache of hot experts: policy, slots and the copies that fill them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.moe.expert_cache import token_runs
from freetoken.moe.lru import Assignment, ExpertLru, FetchCap
from freetoken.moe.stats import ExpertCounter
from freetoken.moe.store import PackedExpertStore, SlotPool
from freetoken.telemetry import ExpertCounts


@dataclass
class _Fetch:
    """Experts that have a slot but are not in it yet."""

    layer_id: int
    experts: list[int]
    slots: list[int]


class OffloadMoeCache:
    """Keeps some experts of each layer in slots of a pool, filled from a packed store.

    A step is `ensure_experts` or `ensure_experts_hybrid`, then `copy_missing`, for one layer at a
    time. A fetch that a failed step has left uncopied is undone by the next step.
    """

    def __init__(
        self, store: PackedExpertStore, pool: SlotPool, cap: FetchCap, counter: ExpertCounter
    ) -> None:
        self.cap = cap
        self.counter = counter
        self._store = store
        self._pool = pool
        self._lrus = tuple(
            ExpertLru(len(store.records(layer_id)), pool.slots) for layer_id in range(store.layers)
        )
        self._found = [Assignment([], [], 0, 0)] * store.layers
        self._fetch = _Fetch(0, [], [])

    @property
    def slots(self) -> int:
        """Slots per layer."""
        return self._pool.slots

    def ensure_experts(self, layer_id: int, topk_ids: Tensor) -> None:
        """Rewrite ids int32 [T, K] in place to slots; every miss is fetched. -1 stays -1.

        Raises CapacityError, and changes nothing, if the distinct experts exceed the slots.
        """
        self._ensure(layer_id, topk_ids, None)

    def ensure_experts_hybrid(self, layer_id: int, topk_ids: Tensor) -> None:
        """Rewrite ids int32 [T, K] in place to slots, or to -1 for routes that the CPU computes.

        At most `cap` misses are fetched.
        """
        self._ensure(layer_id, topk_ids, self.cap)

    def _ensure(self, layer_id: int, topk_ids: Tensor, cap: FetchCap | None) -> None:
        self._undo_uncopied()
        found = self._lrus[layer_id].assign(topk_ids.numpy(), cap)
        self._found[layer_id] = found
        self._fetch = _Fetch(layer_id, found.experts, found.slots)

    def token_runs(self, topk_ids: Tensor) -> list[slice]:
        return token_runs(topk_ids, self.slots)

    def copy_missing(self) -> None:
        """Fill the slots that the last call assigned. If a copy fails, its slot and those after
        it are empty again."""
        fetch, self._fetch = self._fetch, _Fetch(0, [], [])
        records = self._store.records(fetch.layer_id)
        for done, (expert, slot) in enumerate(zip(fetch.experts, fetch.slots, strict=True)):
            try:
                self._pool.fill(fetch.layer_id, slot, records[expert])
            except BaseException:
                self._lrus[fetch.layer_id].forget(fetch.slots[done:])
                self._pool.clear(fetch.layer_id, slot)
                raise

    def _undo_uncopied(self) -> None:
        if self._fetch.slots:
            self._lrus[self._fetch.layer_id].forget(self._fetch.slots)
            self._fetch = _Fetch(0, [], [])

    def record_stats(self, layer_id: int) -> None:
        """Count the layer's last ensure call as one decode step."""
        self.record_into(self.counter, layer_id)

    def record_into(self, counter: ExpertCounter, layer_id: int, *, steps: int = 1) -> None:
        """Add what the layer's last ensure call found to another counter; steps=0: as a further
        wave of the same step."""
        found = self._found[layer_id]
        fetched = len(found.experts)
        counter.add(
            layer_id, hits=found.hits, fetched=fetched, cpu=found.misses - fetched, steps=steps
        )

    def stats(self) -> tuple[ExpertCounts, ...]:
        """Decode counts of each layer."""
        return self.counter.layers()

    def resident(self, layer_id: int) -> dict[int, int]:
        """Slot of each expert of a layer that has one."""
        slot_of = self._lrus[layer_id].slot_of
        return {expert: slot for expert, slot in enumerate(slot_of.tolist()) if slot >= 0}

    def check_integrity(self, *, contents: bool = False) -> None:
        """Raise RuntimeError naming a broken invariant; with `contents` also compare every filled
        slot with its expert's record."""
        for layer_id, lru in enumerate(self._lrus):
            try:
                lru.check_integrity()
            except RuntimeError as error:
                raise RuntimeError(f"MoE layer {layer_id}: {error}") from error
            if contents:
                self._check_contents(layer_id)

    def _check_contents(self, layer_id: int) -> None:
        uncopied = self._fetch.slots if self._fetch.layer_id == layer_id else []
        records = self._store.records(layer_id)
        for expert, slot in self.resident(layer_id).items():
            held = self._pool.record(layer_id, slot)
            if slot not in uncopied and not torch.equal(held, records[expert]):
                raise RuntimeError(
                    f"MoE layer {layer_id}: slot {slot} does not hold expert {expert}'s weights"
                )
