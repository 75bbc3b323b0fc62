"""Ctrl-C between steps, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class PendingInterrupts:
    """SIGINTs that arrived while they were held back."""

    def __init__(self, handler: Callable[[int, FrameType | None], object] | None) -> None:
        """`handler` was there before; None where nothing is held back."""
        self._handler = handler
        self._arrived: list[tuple[int, FrameType | None]] = []

    def hold(self, number: int, frame: FrameType | None) -> None:
        """The handler in the meantime."""
        self._arrived.append((number, frame))

    def deliver(self) -> None:
        """Hand what has arrived to the handler that was there; nothing happens without any."""
        if self._arrived and self._handler is not None:
            number, frame = self._arrived[0]
            self._arrived.clear()
            self._handler(number, frame)


@contextmanager
def deferred_interrupts() -> Iterator[PendingInterrupts]:
    """Hold SIGINT back until the block is done, or asks for it with `deliver`; then hand it to the
    handler that was there, also if the block raises.

    A step changes page tables, expert caches and native queues together; an exception in the
    middle would leave them disagreeing. Outside the main thread, where Python delivers no signals,
    and under a handler that was not set from Python, there is nothing to hold back.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if in_main_thread else None
    if not callable(handler):
        yield PendingInterrupts(None)
        return
    pending = PendingInterrupts(handler)
    signal.signal(signal.SIGINT, pending.hold)
    try:
        yield pending
    finally:
        signal.signal(signal.SIGINT, handler)
        pending.deliver()
