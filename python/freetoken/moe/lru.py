"""Capped-fetch LRU: which experts of one layer hold slots, as plain NumPy arrays.

No tensors and no weights here: this is what a CPU device runs, and the oracle of any GPU version,
which must agree with it bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from freetoken.errors import CapacityError, ConfigError
from freetoken.kernels.base import FRACTION_ONE

UNLIMITED = np.iinfo(np.int32).max


@dataclass(frozen=True)
class FetchCap:
    """How many misses of a call may be fetched; the others are computed on the CPU.

    `value` is a 0-d int32 array that is read anew at every call, so that it can be changed between
    steps: a number of experts, or a fraction of the misses in units of 1/65536. Fractions are
    integers so that every implementation rounds alike.
    """

    value: npt.NDArray[np.int32]
    is_fraction: bool

    @staticmethod
    def fixed(experts: int | None) -> FetchCap:
        """At most `experts` fetches per call; None: no limit. Raises ConfigError if negative."""
        if experts is not None and experts < 0:
            raise ConfigError(
                f"max_fetch is {experts}; expected 0 (fetch nothing) or more, or None (no limit)"
            )
        limit = UNLIMITED if experts is None else min(experts, UNLIMITED)
        return FetchCap(np.array(limit, dtype=np.int32), is_fraction=False)

    @staticmethod
    def fraction(share: float) -> FetchCap:
        """Fetch `share` of the misses. Raises ConfigError outside [0, 1]."""
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"the fetched share of the misses is {share}; expected 0 to 1")
        return FetchCap(np.array(round(share * FRACTION_ONE), dtype=np.int32), is_fraction=True)

    def set(self, value: int) -> None:
        """Change it for the calls to come. Raises ConfigError for a value out of range."""
        self.value[...] = self.checked(value)

    def checked(self, value: int) -> int:
        """The value itself. Raises ConfigError if it is out of range."""
        most = FRACTION_ONE if self.is_fraction else UNLIMITED
        if not 0 <= value <= most:
            raise ConfigError(f"the fetch cap was set to {value}; expected 0 to {most}")
        return value

    def limit(self, misses: int) -> int:
        """The cap for a call with that many misses.

        A fraction f is the share at which fetching and computing take equally long: n fetches
        take time in proportion to n * (1 - f), the other misses (misses - n) * f. Of the integers
        the one that makes the longer of the two shortest is taken; on a tie the larger, since a
        fetched expert may be a hit next time. Raises ConfigError for a value out of range.
        """
        value = self.checked(int(self.value))
        if not self.is_fraction:
            return value
        fewer = value * misses // FRACTION_ONE
        cpu_side = (misses - fewer) * value
        gpu_side = (fewer + 1) * (FRACTION_ONE - value)
        return fewer if fewer == misses or cpu_side < gpu_side else fewer + 1


class Assignment(NamedTuple):
    """What one call decided: experts[i] is to be copied into slots[i]."""

    experts: list[int]
    slots: list[int]
    hits: int
    misses: int


class ExpertLru:
    """Slots, residency and recency of one layer's `experts` experts in `slots` slots.

    Arrays over experts have one entry more, so that id -1 (a padded row's) reads and writes that
    entry: it stays "in no slot" and never counts as active. Steps begin at 1; 0 is "never".
    """

    def __init__(self, experts: int, slots: int) -> None:
        self.experts = experts
        self.slots = slots
        self.step = 0
        self.slot_of = np.full(experts + 1, -1, dtype=np.int32)
        self.last_active = np.zeros(experts + 1, dtype=np.int64)
        self.expert_in = np.full(slots, -1, dtype=np.int32)
        self.last_used = np.zeros(slots, dtype=np.int64)
        self._asked = np.zeros(experts + 1, dtype=np.bool_)

    def assign(self, ids: npt.NDArray[np.int32], cap: FetchCap | None) -> Assignment:
        """Serve one call: ids int32 [T, K] are rewritten in place to slots, or -1.

        The active set is the union of the ids. Hits refresh their slot. Of the misses at most
        `cap` (None: all) are fetched, most recently active first (ties: lower id), each into the
        least recently used slot (ties: lower slot) that no active expert owns.
        Raises ValueError for an id outside [-1, experts), ConfigError for a cap out of range, and
        CapacityError if all misses must be fetched but do not fit; nothing has changed then.
        """
        wanted = ids.astype(np.intp)
        if wanted.size and (wanted.min() < -1 or wanted.max() >= self.experts):
            raise ValueError(
                f"expert ids from {wanted.min()} to {wanted.max()}; "
                f"expected -1 (a padded row) to {self.experts - 1}"
            )
        active = self._active(wanted)
        slots = self.slot_of[active]
        missing = active[slots < 0]
        misses = len(missing)
        hits = len(active) - misses
        if cap is None and len(active) > self.slots:
            raise CapacityError(
                f"one call needs {len(active)} experts at once, but the cache has {self.slots} "
                f"slots per layer; split the call or raise cache_slots to {len(active)}"
            )
        allowed = misses if cap is None else cap.limit(misses)

        self.step += 1
        if hits:
            self.last_used[slots if hits == len(active) else slots[slots >= 0]] = self.step
        fetches = min(allowed, misses, self.slots - hits)
        chosen, victims = self._fetch(missing, fetches) if fetches else ([], [])
        self.last_active[active] = self.step
        ids[...] = self.slot_of[wanted]
        return Assignment(chosen, victims, hits, misses)

    def _active(self, wanted: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Distinct ids >= 0, ascending."""
        self._asked[wanted] = True
        self._asked[-1] = False
        active = self._asked.nonzero()[0]
        self._asked[active] = False
        return active

    def _fetch(self, missing: npt.NDArray[np.intp], fetches: int) -> tuple[list[int], list[int]]:
        """Give slots to the `fetches` most recently active of `missing`.

        Hits already carry this step, so their slots sort last; as there are at least `fetches`
        others, none of them is taken.
        """
        chosen = missing[(-self.last_active[missing]).argsort(kind="stable")[:fetches]]
        victims = self.last_used.argsort(kind="stable")[:fetches]
        self.slot_of[self.expert_in[victims]] = -1  # empty slots write the spare entry
        self.slot_of[chosen] = victims
        self.expert_in[victims] = chosen
        self.last_used[victims] = self.step
        return chosen.tolist(), victims.tolist()

    def forget(self, slots: list[int]) -> None:
        """Mark slots as never filled: what was to be copied into them did not arrive."""
        for slot in slots:
            self.slot_of[self.expert_in[slot]] = -1
            self.expert_in[slot] = -1
            self.last_used[slot] = 0

    def check_integrity(self) -> None:
        """Raise RuntimeError naming the first broken invariant."""
        if self.slot_of[-1] != -1 or self.last_active[-1] != 0:
            raise RuntimeError("a padded row has touched the LRU")
        if self._asked.any():
            raise RuntimeError("the scratch set of active experts is not empty between calls")
        resident = np.flatnonzero(self.slot_of >= 0)
        filled = np.flatnonzero(self.expert_in >= 0)
        if len(resident) != len(filled):
            raise RuntimeError(f"{len(resident)} resident experts in {len(filled)} filled slots")
        for expert in resident.tolist():
            slot = int(self.slot_of[expert])
            if self.expert_in[slot] != expert:
                raise RuntimeError(
                    f"expert {expert} claims slot {slot}, which holds {self.expert_in[slot]}"
                )
            if self.last_used[slot] != self.last_active[expert]:
                raise RuntimeError(
                    f"slot {slot} was used at step {self.last_used[slot]}, but its expert "
                    f"{expert} was last active at step {self.last_active[expert]}"
                )
        if self.last_used[self.expert_in < 0].any():
            raise RuntimeError("an empty slot has a usage step")
        if self.last_active.max(initial=0) > self.step:
            raise RuntimeError(f"an expert was active after the present step {self.step}")
