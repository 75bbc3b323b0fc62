"""Calls that need more experts than slots: waves cover every route once and each fits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.moe.waves import split_experts, split_tokens

IDS = st.integers(1, 3).flatmap(
    lambda k: st.lists(
        st.lists(st.integers(-1, 9), min_size=k, max_size=k), min_size=1, max_size=8
    ).map(lambda rows: np.array(rows, dtype=np.int32))
)


def distinct(ids: npt.NDArray[np.int32]) -> set[int]:
    return set(ids.flatten().tolist()) - {-1}


@settings(deadline=None)
@given(ids=IDS, slots=st.integers(3, 12))
def test_token_runs_are_consecutive_fit_and_are_as_long_as_they_can_be(
    ids: npt.NDArray[np.int32], slots: int
) -> None:
    runs = split_tokens(ids, slots)
    assert [t for run in runs for t in range(run.start, run.stop)] == list(range(len(ids)))
    assert all(len(distinct(ids[run])) <= slots for run in runs)
    for run, following in pairwise(runs):
        assert len(distinct(ids[run.start : following.start + 1])) > slots


@settings(deadline=None)
@given(ids=IDS, slots=st.integers(1, 12), resident=st.sets(st.integers(0, 9)))
def test_expert_waves_cover_each_route_once_residents_first(
    ids: npt.NDArray[np.int32], slots: int, resident: set[int]
) -> None:
    waves = split_experts(ids, slots, resident)
    covered = sum((wave.astype(int) for wave in waves), np.zeros(ids.shape, int))
    assert (covered == (ids >= 0)).all()
    sets = [distinct(ids[wave]) for wave in waves]
    assert all(0 < len(experts) <= slots for experts in sets)
    assert sum(map(len, sets)) == len(distinct(ids))  # an expert is in one wave
    assert len(waves) == -(-len(distinct(ids)) // slots)
    for experts, later in pairwise(sets):
        assert experts <= resident or not later & resident


def test_one_run_when_the_batch_fits_anyway() -> None:
    assert split_tokens(np.array([[1, 2], [3, 4]], dtype=np.int32), 4) == [slice(0, 2)]
    assert split_experts(np.full((2, 2), -1, dtype=np.int32), 4, ()) == []
