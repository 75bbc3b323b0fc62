"""When Ctrl-C takes effect."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from freetoken.engine.interrupts import deferred_interrupts


@pytest.fixture
def delivered() -> Iterator[list[int]]:
    """The signals that reached a handler which raises nothing."""
    numbers: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        numbers.append(number)

    before = signal.signal(signal.SIGINT, handler)
    yield numbers
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_it_waits_for_the_end_of_the_block(delivered: list[int]) -> None:
    with deferred_interrupts():
        press()
        press()
        assert delivered == []
    assert delivered == [signal.SIGINT]


def test_the_block_can_ask_for_it(delivered: list[int]) -> None:
    with deferred_interrupts() as interrupts:
        interrupts.deliver()
        press()
        interrupts.deliver()
        assert delivered == [signal.SIGINT]
    assert delivered == [signal.SIGINT]


def test_it_is_not_lost_if_the_block_raises() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, deferred_interrupts():
        press()
        raise ValueError("in the block")
    assert isinstance(raised.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_stays_an_error_under_a_handler_that_raises_nothing(delivered: list[int]) -> None:
    with pytest.raises(ValueError, match="in the block"), deferred_interrupts():
        press()
        raise ValueError("in the block")
    assert delivered == [signal.SIGINT]


def test_an_inner_block_hands_it_to_the_outer(delivered: list[int]) -> None:
    with deferred_interrupts():
        with deferred_interrupts():
            press()
        assert delivered == []
    assert delivered == [signal.SIGINT]


def test_other_threads_hold_nothing_back(delivered: list[int]) -> None:
    seen = []

    def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        with deferred_interrupts() as interrupts:
            seen.append(signal.getsignal(signal.SIGINT) is before)
            interrupts.deliver()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True] and delivered == []
