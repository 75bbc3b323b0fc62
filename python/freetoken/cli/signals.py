"""Signals that ask a command to end, so that it can tidy up first."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ASKS_TO_END = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def tidy_ends() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the block and end the command with status 128 + signal, as a shell
    would report it. One that is ignored (`nohup`) stays so."""
    before = {
        number: handler
        for number in _ASKS_TO_END
        if (handler := signal.getsignal(number)) is not signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
