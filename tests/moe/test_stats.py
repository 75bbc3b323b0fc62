"""Counts of experts: sums, steps and the distinct experts of a batch."""

from __future__ import annotations

import numpy as np

from freetoken.moe.stats import ExpertCounter, count_active, total_counts
from freetoken.telemetry import ExpertCounts


def test_counter_keeps_layers_apart_and_adds_up() -> None:
    counter = ExpertCounter(2)
    counter.add(0, hits=1, fetched=2, cpu=3)
    counter.add(0, hits=1, fetched=0, cpu=0)
    counter.add(1, hits=0, fetched=0, cpu=4)
    counter.add(1, hits=5, fetched=0, cpu=0, steps=0)
    assert counter.layer(0) == ExpertCounts(2, active=7, hits=2, misses=5, fetched=2, cpu=3)
    assert counter.layers()[1] == ExpertCounts(1, active=9, hits=5, misses=4, fetched=0, cpu=4)
    total = total_counts(counter.layers())
    assert total == ExpertCounts(2, active=16, hits=7, misses=9, fetched=2, cpu=7)
    counter.reset()
    assert counter.layers() == (ExpertCounts(), ExpertCounts())


def test_total_of_no_layers_is_zero() -> None:
    assert total_counts([]) == ExpertCounts()


def test_active_experts_are_distinct_and_not_padding() -> None:
    ids = np.array([[0, 3], [3, 7], [-1, -1]], dtype=np.int32)
    assert count_active(ids, 8) == 3
