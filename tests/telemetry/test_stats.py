"""Adding up steps."""

from __future__ import annotations

import pytest

from freetoken.telemetry import StepTimer


def test_phases_are_timed_apart() -> None:
    timer = StepTimer()
    timer.add_prefill(0.5, 100)
    timer.add_prefill(0.5, 50)
    timer.add_decode(2.0, 8)
    timing = timer.timing(load_s=3.0)
    assert timing.prefill_tokens_per_s == pytest.approx(150)
    assert timing.decode_tokens_per_s == pytest.approx(4)
    assert (timing.load_s, timing.prefill_tokens, timing.decode_tokens) == (3.0, 150, 8)


def test_no_time_means_no_rate() -> None:
    timing = StepTimer().timing(load_s=0.0)
    assert timing.prefill_tokens_per_s == timing.decode_tokens_per_s == 0.0
