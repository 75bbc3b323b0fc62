"""The cache of hot experts with its bookkeeping on the GPU: kernels decide, copy and count.

Nothing in a decode step is read on the host, so that a graph can hold it. What OffloadMoeCache
raises at once, a kernel can only mark; `raise_errors` finds the mark later, and must be asked
before a step's result is used (freetoken.moe.step_guard).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freetoken.errors import CapacityError, ConfigError
from freetoken.kernels.triton.copy import copy_fetched, copy_fetched_plain
from freetoken.kernels.triton.lru import (
    COUNT,
    ERROR,
    NO_ROOM,
    PENDING,
    WRONG_CAP,
    WRONG_ID,
    LruState,
    assign,
)
from freetoken.moe.expert_cache import token_runs
from freetoken.moe.lru import ExpertLru, FetchCap
from freetoken.moe.stats import DeviceExpertCounter
from freetoken.moe.store import PackedExpertStore, SlotPool
from freetoken.telemetry import ExpertCounts


class DeviceFetchCap:
    """A FetchCap whose `value`, int32 [], lies on a device, where kernels read it anew at every
    call: also in replays of a graph that was captured before it changed."""

    def __init__(self, cap: FetchCap, device: torch.device) -> None:
        self._range = cap
        self.is_fraction = cap.is_fraction
        self.value = torch.tensor(int(cap.value), dtype=torch.int32, device=device)

    def set(self, value: int) -> None:
        """Change it for the calls to come. Raises ConfigError for a value out of range."""
        self.value.fill_(self._range.checked(value))


@dataclass(frozen=True)
class _Call:
    """The last ensure call, until its copies are made; it fetches `most` experts at most, 0 of a
    layer of which it may fetch none."""

    layer_id: int
    most: int


@dataclass(frozen=True)
class _Count:
    """What a call found is to be added to row int64 [4] when its experts are copied."""

    layer_id: int
    row: Tensor
    steps: int


class DeviceMoeCache:
    """freetoken.moe.expert_cache.ExpertCache on the pool's device.

    A fetch stays marked as pending, on the device, until its experts are copied; the layer's next
    call undoes it if they never were.

    Of the store's plain layers, whose records the device cannot read, `ensure_experts_hybrid`
    fetches nothing: their slots hold the first experts for good, and the CPU computes the others.
    `ensure_experts` does fetch; then `copy_missing` reads on the host what is to be copied, and no
    graph can hold that.
    """

    def __init__(
        self, store: PackedExpertStore, pool: SlotPool, cap: FetchCap, counter: DeviceExpertCounter
    ) -> None:
        device = pool.records(0).device
        self.cap = DeviceFetchCap(cap, device)
        self.counter = counter
        self._store = store
        self._pool = pool
        self._status = torch.zeros(store.layers, 4, dtype=torch.int32, device=device)
        self._states = tuple(
            replace(LruState.empty(len(store.records(layer_id)), pool.slots, device), status=status)
            for layer_id, status in enumerate(self._status)
        )
        self._call: _Call | None = None
        self._count: _Count | None = None
        self._no_fetch = torch.zeros((), dtype=torch.int32, device=device)
        for layer_id in sorted(store.plain_layers):
            self._fill(layer_id)

    def _fill(self, layer_id: int) -> None:
        """Bring a layer's first experts into its slots."""
        experts = min(self.slots, len(self._store.records(layer_id)))
        ids = torch.arange(experts, dtype=torch.int32, device=self._status.device)
        self.ensure_experts(layer_id, ids)
        self.copy_missing()

    @property
    def slots(self) -> int:
        """Slots per layer."""
        return self._pool.slots

    @property
    def marks(self) -> Tensor:
        """int32 [layers, 4] on the device, which `raise_errors` understands. Not to be written."""
        return self._status

    def state(self, layer_id: int) -> LruState:
        """A layer's state on the device. Not to be written."""
        return self._states[layer_id]

    def ensure_experts(self, layer_id: int, topk_ids: Tensor) -> None:
        """As ExpertCache says. Reads an error mark on the host if, and only if, there are more
        ids than slots; with fewer, all that are asked for fit."""
        self._ensure(layer_id, topk_ids, None)
        if topk_ids.numel() > self.slots:
            self.raise_errors()

    def ensure_experts_hybrid(self, layer_id: int, topk_ids: Tensor) -> None:
        """Rewrite ids int32 [T, K] in place to slots, or to -1 for routes that the CPU computes.

        At most `cap` misses are fetched.
        """
        if layer_id in self._store.plain_layers:
            self._ensure(layer_id, topk_ids, self._no_fetch)
            self._call = _Call(layer_id, 0)
        else:
            self._ensure(layer_id, topk_ids, self.cap.value)

    def _ensure(self, layer_id: int, topk_ids: Tensor, cap: Tensor | None) -> None:
        self._count_now()  # before the call's findings are overwritten
        assign(self._states[layer_id], topk_ids, cap, is_fraction=self.cap.is_fraction)
        self._call = _Call(layer_id, min(topk_ids.numel(), self.slots))

    def token_runs(self, topk_ids: Tensor) -> list[slice]:
        return token_runs(topk_ids, self.slots)

    def copy_missing(self) -> None:
        """Fill the slots that the last call assigned, in one launch, which also counts."""
        call, count = self._call, self._count
        self._call = self._count = None
        if call is None:
            return
        state = self._states[call.layer_id]
        records, slots = self._store.records(call.layer_id), self._pool.records(call.layer_id)
        if call.layer_id in self._store.plain_layers:
            if call.most > 0:
                copy_fetched_plain(state, records, slots)
                self._count = count
                self._count_now()
                return
            records = slots  # nothing is copied from them, but the launch ends the call
        copy_fetched(
            state,
            records,
            slots,
            most=call.most,
            count_into=None if count is None else count.row,
            steps=0 if count is None else count.steps,
        )

    def new_counter(self) -> DeviceExpertCounter:
        return DeviceExpertCounter(len(self._states), self._status.device)

    def record_stats(self, layer_id: int) -> None:
        """Count the layer's last ensure call as one decode step."""
        self.record_into(self.counter, layer_id)

    def record_into(self, counter: DeviceExpertCounter, layer_id: int, *, steps: int = 1) -> None:
        """Add what the layer's last ensure call found to another counter; steps=0: as a further
        wave of the same step. If its experts are yet to be copied, that launch does it."""
        self._count_now()
        self._count = _Count(layer_id, counter.row(layer_id), steps)
        if self._call is None or self._call.layer_id != layer_id:
            self._count_now()

    def _count_now(self) -> None:
        count, self._count = self._count, None
        if count is not None:
            count.row[0] += count.steps
            count.row[1:] += self._states[count.layer_id].found

    def stats(self) -> tuple[ExpertCounts, ...]:
        """Decode counts of each layer. Reads them from the device."""
        self._count_now()
        self.raise_errors()
        return self.counter.layers()

    def raise_errors(self, marks: Tensor | None = None) -> None:
        """Raise what a call since the last look could not: ValueError, ConfigError or
        CapacityError, as ExpertLru.assign does. Such a call has computed nothing. Reads the device,
        or, if they are given, a copy of its marks on the host.
        """
        marks = self._status if marks is None else marks
        for layer_id, (_, _, error, needed) in enumerate(marks.tolist()):
            if error:
                self._status[:, ERROR] = 0
                raise self._error(layer_id, error, needed)

    def _error(self, layer_id: int, error: int, needed: int) -> Exception:
        if error & WRONG_ID:
            experts = self._states[layer_id].experts
            return ValueError(
                f"MoE layer {layer_id}: an expert id is out of range; expected -1 (a padded row) "
                f"to {experts - 1}"
            )
        if error & WRONG_CAP:
            return ConfigError(
                f"MoE layer {layer_id}: the fetch cap was out of its range; change it by set()"
            )
        assert error & NO_ROOM
        return CapacityError(
            f"MoE layer {layer_id}: one call needs {needed} experts at once, but the cache has "
            f"{self.slots} slots per layer; split the call or raise cache_slots to {needed}"
        )

    def resident(self, layer_id: int) -> dict[int, int]:
        """Slot of each expert of a layer that is in one, or is being fetched by the present call.
        Reads the device."""
        state = self._states[layer_id]
        lost = set() if self._is_present(layer_id) else set(_uncopied(state))
        slot_of = state.slot_of.tolist()
        return {
            expert: slot for expert, slot in enumerate(slot_of) if slot >= 0 and slot not in lost
        }

    def _is_present(self, layer_id: int) -> bool:
        return self._call is not None and self._call.layer_id == layer_id

    def check_integrity(self, *, contents: bool = False) -> None:
        """Raise RuntimeError naming a broken invariant; with `contents` also compare every filled
        slot with its expert's record. Reads the device."""
        self.raise_errors()
        for layer_id, state in enumerate(self._states):
            try:
                read_back(state).check_integrity()
                _check_fetch_list(state)
            except RuntimeError as error:
                raise RuntimeError(f"MoE layer {layer_id}: {error}") from error
            if contents:
                self._check_contents(layer_id)

    def _check_contents(self, layer_id: int) -> None:
        uncopied = _uncopied(self._states[layer_id])
        records, slots = self._store.records(layer_id), self._pool.records(layer_id).cpu()
        for expert, slot in self.resident(layer_id).items():
            if slot not in uncopied and not torch.equal(slots[slot], records[expert]):
                raise RuntimeError(
                    f"MoE layer {layer_id}: slot {slot} does not hold expert {expert}'s weights"
                )


def read_back(state: LruState) -> ExpertLru:
    """The oracle in the state that the device is in."""
    lru = ExpertLru(state.experts, state.slots)
    lru.step = int(state.step.item())
    lru.slot_of[:-1] = state.slot_of.cpu().numpy()
    lru.last_active[:-1] = state.last_active.cpu().numpy()
    lru.expert_in[:] = state.expert_in.cpu().numpy()
    lru.last_used[:] = state.last_used.cpu().numpy()
    return lru


def _uncopied(state: LruState) -> list[int]:
    """Slots whose experts were assigned but not copied."""
    status = state.status.tolist()
    slots: list[int] = state.fetch_slots[: status[COUNT]].tolist() if status[PENDING] else []
    return slots


def _check_fetch_list(state: LruState) -> None:
    count = int(state.status[COUNT])
    experts, slots = state.fetch_experts.tolist(), state.fetch_slots.tolist()
    if any(entry != -1 for entry in experts[count:] + slots[count:]):
        raise RuntimeError(f"the fetch list goes on after its {count} entries")
    for expert, slot in zip(experts[:count], slots[:count], strict=True):
        if state.slot_of[expert] != slot:
            raise RuntimeError(
                f"expert {expert} was fetched into slot {slot}, but has {state.slot_of[expert]}"
            )
