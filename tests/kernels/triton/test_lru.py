"""The LRU kernel against ExpertLru: every state array after every call, bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from freetoken.errors import CapacityError, ConfigError
from freetoken.kernels.triton.lru import (
    COUNT,
    ERROR,
    NEEDED,
    NO_ROOM,
    PENDING,
    WRONG_CAP,
    WRONG_ID,
    LruState,
    assign,
)
from freetoken.moe.lru import ExpertLru, FetchCap

Ids = npt.NDArray[np.int32]


class Pair:
    """The kernel and its oracle, fed alike. A fetch counts as copied, unless `copied` is False."""

    def __init__(self, experts: int, slots: int, device: str) -> None:
        self.device = device
        self.oracle = ExpertLru(experts, slots)
        self.state = LruState.empty(experts, slots, device)
        self.lost: list[int] = []

    def call(self, ids: Ids, cap: FetchCap | None, *, copied: bool = True) -> list[list[int]]:
        self.oracle.forget(self.lost)
        on_device = torch.from_numpy(ids.copy()).to(self.device)
        self.on_device(on_device, cap)
        found = self.oracle.assign(ids, cap)
        self.oracle.check_integrity()
        assert on_device.tolist() == ids.tolist()
        self.check_state()
        state, count = self.state, len(found.experts)
        rest = [-1] * (state.slots - count)
        assert state.fetch_experts.tolist() == found.experts + rest
        assert state.fetch_slots.tolist() == found.slots + rest
        assert state.found.tolist() == [found.hits, count, found.misses - count]
        assert state.status.tolist() == [count, int(count > 0), 0, 0]
        self.lost = [] if copied else found.slots
        if copied:
            state.status[PENDING] = 0
        return ids.tolist()

    def on_device(self, ids: torch.Tensor, cap: FetchCap | None) -> None:
        if cap is None:
            assign(self.state, ids, None)
            return
        value = torch.from_numpy(cap.value.copy()).to(self.device)
        assign(self.state, ids, value, is_fraction=cap.is_fraction)

    def check_state(self) -> None:
        state, oracle = self.state, self.oracle
        assert state.step.tolist() == [oracle.step]
        assert state.slot_of.tolist() == oracle.slot_of[:-1].tolist()
        assert state.last_active.tolist() == oracle.last_active[:-1].tolist()
        assert state.expert_in.tolist() == oracle.expert_in.tolist()
        assert state.last_used.tolist() == oracle.last_used.tolist()

    def age(self, steps: int) -> None:
        """As if the present were `steps` later and all that happened had happened as late."""
        oracle, state = self.oracle, self.state
        oracle.step += steps
        state.step.add_(steps)
        for times in (oracle.last_active, oracle.last_used, state.last_active, state.last_used):
            times[times > 0] += steps


def ids_of(*rows: list[int]) -> Ids:
    return np.array(rows, dtype=np.int32)


def random_ids(rng: np.random.Generator, experts: int, tokens: int, top_k: int) -> Ids:
    """Distinct ids in each row, low ones more often, so that there are hits; some rows padded."""
    scores = rng.gumbel(size=(tokens, experts)) - 4 * np.arange(experts) / experts
    ids = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)
    ids[rng.random(tokens) < 0.2] = -1
    return np.ascontiguousarray(ids)


def random_cap(rng: np.random.Generator, top: int) -> FetchCap:
    if rng.random() < 0.5:
        return FetchCap.fixed(None if rng.random() < 0.1 else int(rng.integers(0, top + 1)))
    cap = FetchCap.fraction(0.0)
    cap.set(int(rng.choice([0, 1, 1 << 15, (1 << 16) - 1, 1 << 16, rng.integers(0, 1 << 16)])))
    return cap


def run(pair: Pair, seed: int, steps: int, tokens: int, top_k: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = random_ids(rng, pair.oracle.experts, int(rng.integers(1, tokens + 1)), top_k)
        fits = len(np.unique(ids[ids >= 0])) <= pair.oracle.slots
        cap = None if fits and rng.random() < 0.25 else random_cap(rng, 2 * top_k)
        pair.call(ids, cap, copied=bool(rng.random() < 0.75))


@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    seed=st.integers(0, 2**32 - 1),
    experts=st.integers(1, 40),
    slots=st.integers(1, 40),
    tokens=st.integers(1, 8),
    top_k=st.integers(1, 6),
    age=st.sampled_from([0, 2**31 - 3, 2**40]),
)
def test_any_sequence_of_calls_agrees(
    seed: int, experts: int, slots: int, tokens: int, top_k: int, age: int
) -> None:
    pair = Pair(experts, slots, "cuda" if torch.cuda.is_available() else "cpu")
    run(pair, seed, 4, tokens, min(top_k, experts))
    pair.age(age)
    run(pair, seed + 1, 8, tokens, min(top_k, experts))


@pytest.mark.parametrize(
    ("experts", "slots", "tokens", "top_k"),
    [(128, 48, 1, 8), (256, 100, 4, 8), (384, 384, 16, 8), (512, 200, 3, 10), (512, 512, 128, 16)],
)
def test_sizes_of_real_models_agree(
    device: str, experts: int, slots: int, tokens: int, top_k: int
) -> None:
    run(Pair(experts, slots, device), experts + slots, 5, tokens, top_k)


def test_ties_go_to_the_lower_id_and_the_lower_slot(device: str) -> None:
    pair = Pair(40, 3, device)
    pair.call(ids_of([3, 2, 1]), None)
    assert pair.state.expert_in.tolist() == [1, 2, 3]
    assert pair.call(ids_of([37, 35, 36]), FetchCap.fixed(2)) == [[-1, 0, 1]]


def test_the_most_recently_active_misses_come_first(device: str) -> None:
    pair = Pair(8, 1, device)
    pair.call(ids_of([6]), FetchCap.fixed(0))
    pair.call(ids_of([4]), FetchCap.fixed(0))
    assert pair.call(ids_of([2, 4, 6]), FetchCap.fixed(1)) == [[-1, 0, -1]]


def test_slots_of_active_experts_are_never_victims(device: str) -> None:
    pair = Pair(8, 2, device)
    pair.call(ids_of([0], [1]), FetchCap.fixed(2))
    assert pair.call(ids_of([0, 5, 6]), FetchCap.fixed(2)) == [[0, 1, -1]]


def test_padding_alone_advances_the_step_and_nothing_else(device: str) -> None:
    pair = Pair(32, 2, device)  # every lane is an expert's: none is left that -1 could mean
    pair.call(ids_of([3, 31], [-1, -1]), None)
    assert pair.call(ids_of([-1, -1], [-1, -1]), FetchCap.fixed(2)) == [[-1, -1], [-1, -1]]
    assert pair.state.found.tolist() == [0, 0, 0]
    assert [e for e, slot in enumerate(pair.state.slot_of.tolist()) if slot >= 0] == [3, 31]


def test_a_fetch_that_was_not_copied_is_undone(device: str) -> None:
    pair = Pair(40, 34, device)
    many = ids_of(list(range(34)))
    pair.call(many.copy(), None, copied=False)
    pair.call(ids_of([5, 35]), FetchCap.fixed(1), copied=False)  # 34 are undone, 1 is fetched
    assert pair.state.expert_in.tolist() == [5] + [-1] * 33
    pair.call(ids_of([5]), FetchCap.fixed(0))
    assert pair.state.expert_in.tolist() == [-1] * 34


@settings(max_examples=60, deadline=None, derandomize=True)
@given(units=st.integers(0, 1 << 16), misses=st.integers(0, 32))
def test_fractions_round_as_the_oracle_rounds(units: int, misses: int) -> None:
    pair = Pair(32, 32, "cuda" if torch.cuda.is_available() else "cpu")
    cap = FetchCap.fraction(0.0)
    cap.set(units)
    pair.call(ids_of([*range(misses), -1]), cap)
    assert int(pair.state.status[COUNT]) == cap.limit(misses)


@pytest.mark.parametrize("misses", [511, 512])
@pytest.mark.parametrize("units", [1, 64, 128, 65408, 65535, 65536])
def test_fractions_of_many_misses(device: str, misses: int, units: int) -> None:
    pair = Pair(512, 512, device)
    cap = FetchCap.fraction(0.0)
    cap.set(units)
    pair.call(np.arange(misses, dtype=np.int32)[None], cap)


FAILURES = [
    (ids_of([0, 8]), FetchCap.fixed(2), 0, ValueError, WRONG_ID),
    (ids_of([0, 31]), FetchCap.fixed(2), 0, ValueError, WRONG_ID),  # a lane, but no expert
    (ids_of([0, -2]), FetchCap.fixed(2), 0, ValueError, WRONG_ID),
    (ids_of([0, 5]), FetchCap.fixed(2), -1, ConfigError, WRONG_CAP),
    (ids_of([0, 5]), FetchCap.fraction(0.5), -1, ConfigError, WRONG_CAP),
    (ids_of([0, 5]), FetchCap.fraction(0.5), 65537, ConfigError, WRONG_CAP),
    (ids_of([0, 1], [2, 1]), None, 0, CapacityError, NO_ROOM),
]


@pytest.mark.parametrize(("ids", "cap", "value", "error", "bit"), FAILURES)
def test_what_the_oracle_refuses_is_marked_and_changes_nothing(
    device: str, ids: Ids, cap: FetchCap | None, value: int, error: type[Exception], bit: int
) -> None:
    pair = Pair(8, 2, device)
    pair.call(ids_of([4, 5]), None)
    if cap is not None and value:
        cap = FetchCap(np.array(value, np.int32), cap.is_fraction)
    on_device = torch.from_numpy(ids.copy()).to(device)
    pair.on_device(on_device, cap)
    with pytest.raises(error):
        pair.oracle.assign(ids.copy(), cap)
    pair.check_state()
    assert (on_device == -1).all()
    assert pair.state.found.tolist() == [0, 0, 0]
    assert (pair.state.fetch_experts == -1).all() and (pair.state.fetch_slots == -1).all()
    status = pair.state.status.tolist()
    assert (status[COUNT], status[PENDING], status[ERROR]) == (0, 0, bit)
    if bit == NO_ROOM:
        assert status[NEEDED] == 3
    # The mark stays until the host has seen it; a later call is served as if nothing had been.
    again = torch.tensor([[4, 5]], dtype=torch.int32, device=device)
    assign(pair.state, again, None)
    assert again.tolist() == [[0, 1]]
    assert int(pair.state.status[ERROR]) == bit


def test_the_cap_is_read_when_the_kernel_runs(device: str) -> None:
    state = LruState.empty(8, 4, device)
    cap = torch.zeros((), dtype=torch.int32, device=device)
    for allowed, expected in ((0, [-1, -1]), (1, [0, -1]), (2, [0, 1])):
        cap.fill_(allowed)
        ids = torch.tensor([[1, 2]], dtype=torch.int32, device=device)
        assign(state, ids, cap)
        state.status[PENDING] = 0
        assert ids.tolist() == [expected]


def test_ids_that_are_not_contiguous_int32_are_refused(device: str) -> None:
    state = LruState.empty(8, 4, device)
    with pytest.raises(ValueError, match=r"torch.int64 .* expected contiguous int32"):
        assign(state, torch.zeros(2, 2, dtype=torch.int64, device=device), None)
    with pytest.raises(ValueError, match="expected contiguous int32"):
        assign(state, torch.zeros(2, 2, dtype=torch.int32, device=device).T[:1], None)
