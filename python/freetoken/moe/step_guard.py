"""What must be asked after a step, before its result is used: did the CPU's part come, and did the
cache on the device mark an error?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from torch import Tensor

from freetoken import _native
from freetoken.platforms.streams import PinnedMemory


class StepGuard(Protocol):
    """Looks after whole steps."""

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


class MarkingCache(Protocol):
    """What the guard needs of DeviceMoeCache."""

    @property
    def marks(self) -> Tensor:
        """int32 [layers, n] on the device: where kernels mark what they cannot raise."""
        ...

    def raise_errors(self, marks: Tensor | None = None) -> None:
        """Raise what `marks`, a copy on the host, say, and clear them on the device."""
        ...


class CacheMarks:
    """A cache's error marks as a step leaves them: one small copy to pinned host memory, put on
    the current stream when the step is, and read once that is idle."""

    def __init__(
        self,
        cache: MarkingCache,
        memory: PinnedMemory,
    ) -> None:
        self._cache = cache
        self._on_host = memory.pinned(tuple(cache.marks.shape), cache.marks.dtype)

    def send(self) -> None:
        """Put the copy on the current stream."""
        self._on_host.copy_(self._cache.marks, non_blocking=True)

    def check(self) -> None:
        """Raise what the marks say, as DeviceMoeCache.raise_errors does. The stream is idle."""
        self._cache.raise_errors(self._on_host)


class DeviceGuard:
    """StepGuard of steps with CPU experts (`executor`), a cache whose errors are `marks`, or both.
    `synchronize` waits for the stream that they are on."""

    def __init__(
        self,
        synchronize: Callable[[], None],
        executor: GuardedExecutor | None = None,
        marks: CacheMarks | None = None,
    ) -> None:
        self._synchronize = synchronize
        self._executor = executor
        self._marks = marks

    @property
    def capturable(self) -> bool:
        return self._executor is None or self._executor.capturable

    @property
    def handshakes(self) -> int:
        return 0 if self._executor is None else self._executor.submits

    @contextmanager
    def replaying(self, handshakes: int) -> Iterator[None]:
        if self._executor is None:
            yield
            return
        self._executor.announce(handshakes)
        try:
            yield
        except BaseException:
            self._executor.announce(-handshakes)  # nothing was launched: they will not come
            raise

    def after_step(self) -> None:
        """Raises HandshakeError, or what the cache has marked (in the context of the former, if
        there are both); after either the next step may be tried."""
        if self._marks is not None:
            self._marks.send()
        self._synchronize()
        try:
            self._check_executor()
        finally:  # what this step has marked is not to be the next one's error
            if self._marks is not None:
                self._marks.check()

    def _check_executor(self) -> None:
        if self._executor is None:
            return
        try:
            self._executor.check()
        except _native.HandshakeError:
            self._executor.clear()  # itself raises where workers are stuck for good
            raise
