"""The capped-fetch LRU of one layer in one launch of one program.

It does to tensors on the GPU what `freetoken.moe.lru.ExpertLru` does to NumPy arrays, bit for bit,
and reads nothing on the host, so that a captured graph can replay it.

Experts and slots are vectors in registers. Orders are found by counting for each element those
that come before it, a tile at a time; the r-th missing expert then meets the r-th victim by rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.base import FRACTION_ONE
from freetoken.kernels.triton.compile_cases import CompileCase

# Where status int32 [4] has what, and the bits of its error word.
COUNT, PENDING, ERROR, NEEDED = 0, 1, 2, 3
WRONG_ID, WRONG_CAP, NO_ROOM = 1, 2, 4

# How `cap` is to be read.
ALL, FIXED, FRACTION = 0, 1, 2

# The same for kernels, which read no other globals.
AT_COUNT, AT_PENDING = tl.constexpr(COUNT), tl.constexpr(PENDING)
_AT_ERROR, _AT_NEEDED = tl.constexpr(ERROR), tl.constexpr(NEEDED)
_WRONG_ID, _WRONG_CAP = tl.constexpr(WRONG_ID), tl.constexpr(WRONG_CAP)
_NO_ROOM = tl.constexpr(NO_ROOM)
_ALL, _FIXED = tl.constexpr(ALL), tl.constexpr(FIXED)
_ONE = tl.constexpr(FRACTION_ONE)

_IDS_TILE = 16
_LATEST = tl.constexpr(2**63 - 1)


@dataclass(frozen=True)
class LruState:
    """One layer's state on a device, as in ExpertLru but without the entry for padded rows.

    slot_of int32 [E], last_active int64 [E], expert_in int32 [S], last_used int64 [S], step int64
    [1]. Of the last call: fetch_experts and fetch_slots int32 [S], the first `count` of which say
    what is to be copied where, the rest -1; found int64 [3]: hits, fetched, CPU-computed. status
    int32 [4]: count; pending (1 from the call until its experts are copied); error (bits that
    stay until the host clears them); the distinct experts of the call that needed too many.
    """

    slot_of: Tensor
    last_active: Tensor
    expert_in: Tensor
    last_used: Tensor
    step: Tensor
    fetch_experts: Tensor
    fetch_slots: Tensor
    found: Tensor
    status: Tensor

    @staticmethod
    def empty(experts: int, slots: int, device: torch.device | str) -> LruState:
        """No expert has a slot yet."""

        def filled(size: int, value: int, dtype: torch.dtype) -> Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        return LruState(
            slot_of=filled(experts, -1, torch.int32),
            last_active=filled(experts, 0, torch.int64),
            expert_in=filled(slots, -1, torch.int32),
            last_used=filled(slots, 0, torch.int64),
            step=filled(1, 0, torch.int64),
            fetch_experts=filled(slots, -1, torch.int32),
            fetch_slots=filled(slots, -1, torch.int32),
            found=filled(3, 0, torch.int64),
            status=filled(4, 0, torch.int32),
        )

    @property
    def experts(self) -> int:
        return len(self.slot_of)

    @property
    def slots(self) -> int:
        return len(self.expert_in)


def assign(state: LruState, ids: Tensor, cap: Tensor | None, *, is_fraction: bool = False) -> None:
    """Serve one call as ExpertLru.assign does: ids int32, contiguous, are rewritten in place to
    slots, or -1. First undoes a fetch whose experts were never copied (status still says pending).

    `cap` int32 [] or [1] on the device is read by the kernel: a number of experts, or of 1/65536
    of the misses; None: all misses are fetched. Where ExpertLru raises, all ids become -1, a bit
    of status' error word is set, and nothing else changes.
    """
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError(
            f"expert ids are {ids.dtype} with strides {ids.stride()}; expected contiguous int32"
        )
    experts, slots = _padded(state.experts), _padded(state.slots)
    _assign[(1,)](
        ids,
        state.status if cap is None else cap,  # not read without a cap
        state.slot_of,
        state.last_active,
        state.expert_in,
        state.last_used,
        state.step,
        state.fetch_experts,
        state.fetch_slots,
        state.found,
        state.status,
        ids.numel(),
        state.experts,
        state.slots,
        CAP=ALL if cap is None else FRACTION if is_fraction else FIXED,
        EXPERTS=experts,
        SLOTS=slots,
        IDS=_IDS_TILE,
        TILE=_tile(experts, slots),
        num_warps=_warps(experts, slots),
    )


def _padded(size: int) -> int:
    return max(32, triton.next_power_of_2(size))


def _tile(experts: int, slots: int) -> int:
    return 32 if max(experts, slots) <= 256 else 16  # more would spill registers on gfx1100


def _warps(experts: int, slots: int) -> int:
    return 4 if max(experts, slots) <= 128 else 8


@triton.jit
def _any_equal(values, others):
    """Which of values [N] are among others [M]."""
    return tl.max((values[:, None] == others[None, :]).to(tl.int32), axis=1) != 0


@triton.jit
def _rank(key, fetches, SIZE: tl.constexpr, TILE: tl.constexpr):
    """For each of key int64 [SIZE] how many come before it: smaller ones, and equal ones at a
    lower index. Zero for all if nothing is fetched, where no rank is looked at."""
    index = tl.arange(0, SIZE)
    rank = tl.zeros([SIZE], tl.int32)
    for first in range(0, tl.where(fetches > 0, SIZE, 0), TILE):
        at = first + tl.arange(0, TILE)
        other = tl.gather(key, at, 0)
        smaller = other[None, :] < key[:, None]
        earlier = (other[None, :] == key[:, None]) & (at[None, :] < index[:, None])
        rank += tl.sum((smaller | earlier).to(tl.int32), axis=1)
    return rank


@triton.jit
def _limit(cap_ptr, misses, CAP: tl.constexpr):
    """FetchCap.limit, but no more than the misses, and whether the value is out of its range."""
    if CAP == _ALL:
        return misses, misses < 0
    value = tl.load(cap_ptr).to(tl.int64)
    if CAP == _FIXED:
        return tl.minimum(value, misses.to(tl.int64)).to(tl.int32), value < 0
    fewer = value * misses // _ONE
    cpu_side = (misses - fewer) * value
    gpu_side = (fewer + 1) * (_ONE - value)
    fewer_is_best = (fewer == misses) | (cpu_side < gpu_side)
    limit = tl.where(fewer_is_best, fewer, fewer + 1).to(tl.int32)
    return limit, (value < 0) | (value > _ONE)


@triton.jit
def _undo(
    slot_of,
    expert_in,
    last_used,
    fetch_experts_ptr,
    fetch_slots_ptr,
    status_ptr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The three without what the last call fetched and nobody copied: it is in no slot."""
    experts = tl.arange(0, EXPERTS)
    slots = tl.arange(0, SLOTS)
    pending = tl.load(status_ptr + AT_PENDING) != 0
    uncopied = tl.where(pending, tl.load(status_ptr + AT_COUNT), 0)
    for first in range(0, uncopied, TILE):
        at = first + tl.arange(0, TILE)
        lost_expert = tl.load(fetch_experts_ptr + at, mask=at < uncopied, other=-1)
        lost_slot = tl.load(fetch_slots_ptr + at, mask=at < uncopied, other=-1)
        slot_of = tl.where(_any_equal(experts, lost_expert), -1, slot_of)
        empty = _any_equal(slots, lost_slot)
        expert_in = tl.where(empty, -1, expert_in)
        last_used = tl.where(empty, 0, last_used)
    return slot_of, expert_in, last_used


@triton.jit
def _asked_for(ids_ptr, n_ids, n_experts, EXPERTS: tl.constexpr, IDS: tl.constexpr):
    """int32 [EXPERTS]: 1 for the experts among the ids, else 0 (padded rows have id -1, which is no
    expert's); and whether an id is out of range."""
    experts = tl.arange(0, EXPERTS)
    asked = tl.zeros([EXPERTS], tl.int32)
    wrong_ids = tl.zeros([IDS], tl.int32)
    for first in range(0, n_ids, IDS):
        at = first + tl.arange(0, IDS)
        ids = tl.load(ids_ptr + at, mask=at < n_ids, other=-1)
        asked |= _any_equal(experts, ids).to(tl.int32)
        wrong_ids |= ((ids < -1) | (ids >= n_experts)).to(tl.int32)
    return tl.where(experts < n_experts, asked, 0), tl.max(wrong_ids, axis=0) != 0


@triton.jit
def _choose(
    active,
    slot_of,
    last_active,
    expert_in,
    last_used,
    fetches,
    n_slots,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Most recently active misses first, into the least recently used slots of inactive experts:
    the place in that order of each expert and of each slot, -1 where nothing is fetched; and which
    slots hold an active expert."""
    missing = active & (slot_of < 0)
    miss_rank = _rank(tl.where(missing, -last_active, _LATEST), fetches, EXPERTS, TILE)
    miss_rank = tl.where(missing & (miss_rank < fetches), miss_rank, -1)
    held_asked = tl.gather(active.to(tl.int32), tl.maximum(expert_in, 0), 0) != 0
    kept = (expert_in >= 0) & held_asked
    free = (tl.arange(0, SLOTS) < n_slots) & (kept == 0)
    slot_rank = _rank(tl.where(free, last_used, _LATEST), fetches, SLOTS, TILE)
    slot_rank = tl.where(free & (slot_rank < fetches), slot_rank, -1)
    return miss_rank, slot_rank, kept


@triton.jit
def _fetch(
    slot_of,
    expert_in,
    miss_rank,
    slot_rank,
    fetches,
    n_slots,
    fetch_experts_ptr,
    fetch_slots_ptr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The two with the expert and the slot of each place in each other's stead, which is also
    written to the fetch list."""
    experts = tl.arange(0, EXPERTS)
    slots = tl.arange(0, SLOTS)
    victim = slot_rank >= 0
    evicted = tl.gather(victim.to(tl.int32), tl.maximum(slot_of, 0), 0) != 0
    slot_of = tl.where((slot_of >= 0) & evicted, -1, slot_of)
    expert_in = tl.where(victim, -1, expert_in)
    tl.debug_barrier()  # the old fetch list and the ids have been read
    for first in range(0, fetches, TILE):
        rank = first + tl.arange(0, TILE)
        is_miss = miss_rank[:, None] == rank[None, :]
        is_victim = slot_rank[:, None] == rank[None, :]
        expert = tl.sum(tl.where(is_miss, experts[:, None], 0), axis=0)
        slot = tl.sum(tl.where(is_victim, slots[:, None], 0), axis=0)
        # One is added and taken away, as every other entry is -1.
        slot_of += tl.sum(tl.where(is_miss, slot[None, :] + 1, 0), axis=1)
        expert_in += tl.sum(tl.where(is_victim, expert[None, :] + 1, 0), axis=1)
        tl.store(fetch_experts_ptr + rank, expert, mask=rank < fetches)
        tl.store(fetch_slots_ptr + rank, slot, mask=rank < fetches)
    no_fetch = (slots < n_slots) & (slots >= fetches)
    tl.store(fetch_experts_ptr + slots, -1, mask=no_fetch)
    tl.store(fetch_slots_ptr + slots, -1, mask=no_fetch)
    return slot_of, expert_in


@triton.jit
def _to_slots(ids_ptr, n_ids, slot_of, served, IDS: tl.constexpr):
    """Rewrite ids to the slots of their experts, or to -1; all of them where nobody is served."""
    for first in range(0, n_ids, IDS):
        at = first + tl.arange(0, IDS)
        ids = tl.load(ids_ptr + at, mask=at < n_ids, other=-1)
        is_id = (ids >= 0) & served
        slot = tl.gather(slot_of, tl.where(is_id, ids, 0), 0)
        tl.debug_barrier()  # threads that hold the same id have read it
        tl.store(ids_ptr + at, tl.where(is_id, slot, -1), mask=at < n_ids)


@triton.jit(do_not_specialize=["n_ids", "n_experts", "n_slots"])
def _assign(
    ids_ptr,
    cap_ptr,
    slot_of_ptr,
    last_active_ptr,
    expert_in_ptr,
    last_used_ptr,
    step_ptr,
    fetch_experts_ptr,
    fetch_slots_ptr,
    found_ptr,
    status_ptr,
    n_ids,
    n_experts,
    n_slots,
    CAP: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    IDS: tl.constexpr,
    TILE: tl.constexpr,
):
    experts = tl.arange(0, EXPERTS)
    slots = tl.arange(0, SLOTS)
    is_expert = experts < n_experts
    is_slot = slots < n_slots
    slot_of = tl.load(slot_of_ptr + experts, mask=is_expert, other=-1)
    last_active = tl.load(last_active_ptr + experts, mask=is_expert, other=0)
    expert_in = tl.load(expert_in_ptr + slots, mask=is_slot, other=-1)
    last_used = tl.load(last_used_ptr + slots, mask=is_slot, other=0)
    slot_of, expert_in, last_used = _undo(
        slot_of,
        expert_in,
        last_used,
        fetch_experts_ptr,
        fetch_slots_ptr,
        status_ptr,
        EXPERTS,
        SLOTS,
        TILE,
    )
    asked, wrong_id = _asked_for(ids_ptr, n_ids, n_experts, EXPERTS, IDS)
    hits = tl.sum(tl.where(slot_of >= 0, asked, 0), axis=0)
    misses = tl.sum(tl.where(slot_of < 0, asked, 0), axis=0)
    limit, wrong_cap = _limit(cap_ptr, misses, CAP)

    # Like ExpertLru, a call that cannot be served changes nothing.
    error = tl.where(wrong_id, _WRONG_ID, 0)
    error = tl.where((error == 0) & wrong_cap, _WRONG_CAP, error)
    if CAP == _ALL:
        error = tl.where((error == 0) & (hits + misses > n_slots), _NO_ROOM, error)
    needed = hits + misses
    served = error == 0
    hits = tl.where(served, hits, 0)
    misses = tl.where(served, misses, 0)
    active = (asked != 0) & served
    step = tl.load(step_ptr) + served.to(tl.int64)
    fetches = tl.where(served, tl.minimum(limit, n_slots - hits), 0)

    miss_rank, slot_rank, kept = _choose(
        active,
        slot_of,
        last_active,
        expert_in,
        last_used,
        fetches,
        n_slots,
        EXPERTS,
        SLOTS,
        TILE,
    )
    slot_of, expert_in = _fetch(
        slot_of,
        expert_in,
        miss_rank,
        slot_rank,
        fetches,
        n_slots,
        fetch_experts_ptr,
        fetch_slots_ptr,
        EXPERTS,
        SLOTS,
        TILE,
    )
    tl.store(slot_of_ptr + experts, slot_of, mask=is_expert)
    last_active = tl.where(active, step, last_active)
    tl.store(last_active_ptr + experts, last_active, mask=is_expert)
    tl.store(expert_in_ptr + slots, expert_in, mask=is_slot)
    last_used = tl.where(kept | (slot_rank >= 0), step, last_used)
    tl.store(last_used_ptr + slots, last_used, mask=is_slot)
    tl.store(step_ptr, step)
    tl.store(status_ptr + AT_COUNT, fetches)
    tl.store(status_ptr + AT_PENDING, (fetches > 0).to(tl.int32))
    if error != 0:
        tl.store(status_ptr + _AT_ERROR, tl.load(status_ptr + _AT_ERROR) | error)
        tl.store(status_ptr + _AT_NEEDED, needed)
    tl.store(found_ptr, hits.to(tl.int64))
    tl.store(found_ptr + 1, fetches.to(tl.int64))
    tl.store(found_ptr + 2, (misses - fetches).to(tl.int64))
    _to_slots(ids_ptr, n_ids, slot_of, served, IDS)


def _case(experts: int, slots: int, cap: int) -> CompileCase:
    experts, slots = _padded(experts), _padded(slots)
    names = "ids cap slot_of last_active expert_in last_used step fetch_experts fetch_slots found"
    wide = ("last_active", "last_used", "step", "found")
    pointers = {
        f"{name}_ptr": "*i64" if name in wide else "*i32" for name in (*names.split(), "status")
    }
    return CompileCase(
        f"lru_{experts}_{slots}_{cap}",
        _assign,
        pointers | dict.fromkeys(("n_ids", "n_experts", "n_slots"), "i32"),
        {
            "CAP": cap,
            "EXPERTS": experts,
            "SLOTS": slots,
            "IDS": _IDS_TILE,
            "TILE": _tile(experts, slots),
        },
        {"num_warps": _warps(experts, slots), "num_stages": 2},
    )


COMPILE_CASES = [_case(128, 48, FIXED), _case(512, 512, FRACTION), _case(256, 64, ALL)]
