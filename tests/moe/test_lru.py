"""The capped-fetch LRU against hand-worked cases and an independent, slow oracle."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.errors import CapacityError, ConfigError
from freetoken.moe.lru import ExpertLru, FetchCap

UNLIMITED = FetchCap.fixed(None)


def call(lru: ExpertLru, ids: list[list[int]], cap: FetchCap | None = UNLIMITED) -> list[list[int]]:
    array = np.array(ids, dtype=np.int32)
    lru.assign(array, cap)
    lru.check_integrity()
    return array.tolist()


class SlowLru:
    """The rules of the policy in dictionaries and sorted lists, one expert at a time."""

    def __init__(self, experts: int, slots: int) -> None:
        self.experts = experts
        self.holds: dict[int, int | None] = dict.fromkeys(range(slots))
        self.used: dict[int, int] = dict.fromkeys(range(slots), 0)
        self.active_at: dict[int, int] = {}
        self.now = 0

    def where(self, expert: int) -> int | None:
        return next((slot for slot, held in self.holds.items() if held == expert), None)

    def assign(
        self, ids: list[list[int]], limit: Callable[[int], int]
    ) -> tuple[list[list[int]], list[tuple[int, int]]]:
        self.now += 1
        active = {expert for row in ids for expert in row if expert != -1}
        hits = {expert for expert in active if self.where(expert) is not None}
        taken = {self.where(expert) for expert in hits}
        for slot in taken:
            self.used[slot] = self.now
        misses = sorted(active - hits, key=lambda e: (-self.active_at.get(e, 0), e))
        free = sorted((s for s in self.holds if s not in taken), key=lambda s: (self.used[s], s))
        fetched = list(zip(misses[: limit(len(misses))], free, strict=False))
        for expert, slot in fetched:
            self.holds[slot] = expert
            self.used[slot] = self.now
        for expert in active:
            self.active_at[expert] = self.now

        def slot_or_cpu(expert: int) -> int:
            slot = self.where(expert) if expert != -1 else None
            return -1 if slot is None else slot

        return [[slot_or_cpu(expert) for expert in row] for row in ids], fetched


def best_fetches(share: Fraction, misses: int) -> int:
    """Brute force over all numbers of fetches; ties: more."""

    def longer_side(fetches: int) -> Fraction:
        return max(fetches * (1 - share), (misses - fetches) * share)

    return min(range(misses + 1), key=lambda n: (longer_side(n), -n))


def test_duplicates_are_one_miss_and_share_a_slot() -> None:
    lru = ExpertLru(8, 4)
    ids = np.array([[5, 2], [2, 5], [5, 7]], dtype=np.int32)
    found = lru.assign(ids, UNLIMITED)
    assert (found.hits, found.misses) == (0, 3)
    assert found.experts == [2, 5, 7]
    assert ids.tolist() == [[1, 0], [0, 1], [1, 2]]


def test_padded_rows_stay_and_leave_no_trace() -> None:
    lru = ExpertLru(8, 2)
    assert call(lru, [[3, 4], [-1, -1]]) == [[0, 1], [-1, -1]]
    before = (lru.slot_of.copy(), lru.last_active.copy(), lru.last_used.copy())
    ids = np.full((2, 2), -1, dtype=np.int32)
    found = lru.assign(ids, UNLIMITED)
    assert (found.hits, found.misses, found.experts) == (0, 0, [])
    for old, new in zip(before, (lru.slot_of, lru.last_active, lru.last_used), strict=True):
        assert (old == new).all()


def test_hits_refresh_and_the_least_recent_slot_goes() -> None:
    lru = ExpertLru(8, 2)
    call(lru, [[0]])
    call(lru, [[1]])
    assert call(lru, [[0]]) == [[0]]
    assert call(lru, [[2]]) == [[1]]  # 1 was used before 0
    assert call(lru, [[0, 1, 2]], FetchCap.fixed(0)) == [[0, -1, 1]]


def test_slots_of_active_experts_are_never_victims() -> None:
    lru = ExpertLru(8, 2)
    call(lru, [[0], [1]])
    assert call(lru, [[0, 5, 6]]) == [[0, 1, -1]]
    assert call(lru, [[0, 5, 6]]) == [[0, 1, -1]]  # both slots active: no room for 6


def test_most_recently_active_misses_are_fetched_first() -> None:
    lru = ExpertLru(8, 1)
    call(lru, [[6]], FetchCap.fixed(0))
    call(lru, [[4]], FetchCap.fixed(0))
    assert call(lru, [[2, 4, 6]], FetchCap.fixed(1)) == [[-1, 0, -1]]


def test_ties_go_to_the_lower_id_and_the_lower_slot() -> None:
    lru = ExpertLru(8, 3)
    call(lru, [[3, 2, 1]])  # slots 0, 1, 2 hold 1, 2, 3, all of one age
    assert lru.expert_in.tolist() == [1, 2, 3]
    assert call(lru, [[7, 5, 6]], FetchCap.fixed(2)) == [[-1, 0, 1]]


def test_recency_counts_cpu_experts_and_changes_after_the_choice() -> None:
    lru = ExpertLru(8, 1)
    call(lru, [[0]])
    call(lru, [[5]], FetchCap.fixed(0))
    # 3 and 5 are active now; 5 was active before, so it comes first although its id is higher.
    assert call(lru, [[3, 5]], FetchCap.fixed(1)) == [[-1, 0]]


def test_the_cap_is_read_anew_at_every_call() -> None:
    lru = ExpertLru(8, 4)
    cap = FetchCap.fixed(0)
    assert call(lru, [[1, 2]], cap) == [[-1, -1]]
    cap.value[...] = 1
    assert call(lru, [[1, 2]], cap) == [[0, -1]]
    cap.value[...] = 2
    assert call(lru, [[1, 2]], cap) == [[0, 1]]


@settings(deadline=None)
@given(st.integers(0, 1 << 16), st.integers(0, 40))
def test_fraction_rounds_to_the_shorter_longest_side(units: int, misses: int) -> None:
    cap = FetchCap.fraction(0.0)
    cap.value[...] = units
    assert cap.limit(misses) == best_fetches(Fraction(units, 1 << 16), misses)


def test_fraction_end_points_and_a_tie() -> None:
    assert FetchCap.fraction(0.0).limit(7) == 0
    assert FetchCap.fraction(1.0).limit(7) == 7
    assert FetchCap.fraction(0.5).limit(1) == 1  # both sides take as long: fetch


@pytest.mark.parametrize("limit", [-1, -5])
def test_negative_cap_is_refused(limit: int) -> None:
    with pytest.raises(ConfigError, match=f"max_fetch is {limit}; expected 0"):
        FetchCap.fixed(limit)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_fraction_outside_its_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="expected 0 to 1"):
        FetchCap.fraction(share)


@pytest.mark.parametrize("wrong", [-2, 8, 9, 1000])
def test_ids_outside_the_experts_are_refused_before_any_change(wrong: int) -> None:
    lru = ExpertLru(8, 2)
    call(lru, [[1]])
    with pytest.raises(ValueError, match="expected -1"):
        lru.assign(np.array([[0, wrong]], dtype=np.int32), UNLIMITED)
    lru.check_integrity()
    assert lru.step == 1


def test_fetching_all_needs_room_and_says_how_much() -> None:
    lru = ExpertLru(8, 2)
    ids = np.array([[0, 1], [2, 1]], dtype=np.int32)
    with pytest.raises(CapacityError, match=r"3 experts.*2 slots.*cache_slots to 3"):
        lru.assign(ids, None)
    assert ids.tolist() == [[0, 1], [2, 1]]
    assert lru.step == 0


def test_forgotten_slots_are_empty_and_first_to_be_filled() -> None:
    lru = ExpertLru(8, 3)
    call(lru, [[4, 5, 6]])
    lru.forget([1])
    lru.check_integrity()
    assert lru.expert_in.tolist() == [4, -1, 6]
    assert call(lru, [[5]]) == [[1]]


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("slot_of", -1, 0, "padded row"),
        ("slot_of", 3, 1, "resident"),
        ("expert_in", 0, 5, "claims slot"),
        ("last_used", 0, 9, "was used at step"),
        ("last_used", 1, 1, "empty slot"),
    ],
)
def test_integrity_check_finds_damage(field: str, index: int, value: int, message: str) -> None:
    lru = ExpertLru(8, 2)
    call(lru, [[4]])
    {"slot_of": lru.slot_of, "expert_in": lru.expert_in, "last_used": lru.last_used}[field][
        index
    ] = value
    with pytest.raises(RuntimeError, match=message):
        lru.check_integrity()


@pytest.mark.parametrize(
    ("cap", "value", "message"),
    [
        (FetchCap.fixed(1), -1, "set to -1; expected 0 to"),
        (FetchCap.fraction(0.5), -1, "set to -1; expected 0 to 65536"),
        (FetchCap.fraction(0.5), 65537, "set to 65537; expected 0 to 65536"),
    ],
)
def test_a_cap_set_out_of_range_is_refused_and_changes_nothing(
    cap: FetchCap, value: int, message: str
) -> None:
    lru = ExpertLru(8, 2)
    call(lru, [[4, 5]])
    cap.value[...] = value
    arrays = (lru.slot_of, lru.last_active, lru.expert_in, lru.last_used)
    before = [array.copy() for array in arrays]
    ids = np.array([[4, 6]], dtype=np.int32)
    with pytest.raises(ConfigError, match=message):
        lru.assign(ids, cap)
    assert all(np.array_equal(*pair) for pair in zip(arrays, before, strict=True))
    assert lru.step == 1 and ids.tolist() == [[4, 6]]
    lru.check_integrity()


def run_against_oracle(seed: int, steps: int, experts: int, slots: int, top_k: int) -> None:
    rng = np.random.default_rng(seed)
    lru, oracle = ExpertLru(experts, slots), SlowLru(experts, slots)
    cap = FetchCap.fixed(0)
    share = FetchCap.fraction(0)
    for _ in range(steps):
        tokens = int(rng.integers(1, 5))
        # Skewed towards low ids, so that there are hits; some rows are padded.
        scores = rng.gumbel(size=(tokens, experts)) - 0.1 * np.arange(experts)
        ids = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)
        ids[rng.random(tokens) < 0.2] = -1
        raw = ids.tolist()
        if rng.random() < 0.5:
            cap.value[...] = rng.integers(0, top_k * 2)
            found = lru.assign(ids, cap)
            expected, fetched = oracle.assign(raw, lambda _: int(cap.value))
        else:
            share.value[...] = rng.integers(0, (1 << 16) + 1)
            found = lru.assign(ids, share)
            fraction = Fraction(int(share.value), 1 << 16)
            expected, fetched = oracle.assign(raw, partial(best_fetches, fraction))
        assert ids.tolist() == expected
        assert list(zip(found.experts, found.slots, strict=True)) == fetched
        lru.check_integrity()
        assert found.hits + found.misses == len({e for row in raw for e in row} - {-1})
    assert lru.expert_in.tolist() == [-1 if e is None else e for e in oracle.holds.values()]


def test_ten_thousand_random_steps_agree_with_the_oracle() -> None:
    run_against_oracle(seed=1, steps=10_000, experts=24, slots=7, top_k=3)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    experts=st.integers(1, 20),
    slots=st.integers(1, 20),
    top_k=st.integers(1, 6),
)
def test_any_geometry_agrees_with_the_oracle(
    seed: int, experts: int, slots: int, top_k: int
) -> None:
    run_against_oracle(seed, 60, experts, slots, min(top_k, experts))
