"""What must be asked after a step, before its result is used: did the CPU's part come?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from freetoken import _native


class StepGuard(Protocol):
    """Looks after the handshakes of whole steps."""

    @property
    def capturable(self) -> bool:
        """Whether steps may be captured into graphs."""
        ...

    @property
    def handshakes(self) -> int:
        """How many were put on a stream so far, captured ones too."""
        ...

    def replaying(self, handshakes: int) -> AbstractContextManager[object]:
        """To be open around the launch of a graph that captured so many."""
        ...

    def after_step(self) -> None:
        """Wait for the step. Raises what went wrong in it; then its result must not be used."""
        ...


class NoGuard:
    """For steps that wait for nobody: they can be captured, and end on the stream."""

    capturable = True
    handshakes = 0

    def replaying(self, handshakes: int) -> AbstractContextManager[object]:
        return nullcontext()

    def after_step(self) -> None:
        return None


class GuardedExecutor(Protocol):
    """What the guard needs of GpuCpuMoeExecutor."""

    @property
    def capturable(self) -> bool: ...

    @property
    def submits(self) -> int: ...

    def announce(self, handshakes: int) -> None: ...

    def check(self) -> None: ...

    def clear(self) -> None: ...


class HandshakeGuard:
    """StepGuard of steps with CPU experts. `synchronize` waits for the stream that they are on."""

    def __init__(self, executor: GuardedExecutor, synchronize: Callable[[], None]) -> None:
        self._executor = executor
        self._synchronize = synchronize

    @property
    def capturable(self) -> bool:
        return self._executor.capturable

    @property
    def handshakes(self) -> int:
        return self._executor.submits

    @contextmanager
    def replaying(self, handshakes: int) -> Iterator[None]:
        self._executor.announce(handshakes)
        try:
            yield
        except BaseException:
            self._executor.announce(-handshakes)  # nothing was launched: they will not come
            raise

    def after_step(self) -> None:
        """Raises HandshakeError, after which the next step may be tried."""
        self._synchronize()
        try:
            self._executor.check()
        except _native.HandshakeError:
            self._executor.clear()  # itself raises where workers are stuck for good
            raise
