"""Order on a device: pieces of work that go one after the other, and events between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class Timeline(Protocol):
    """Work in order of submission, beside that of other timelines. A stream, on a GPU."""

    def use(self) -> AbstractContextManager[object]:
        """Work submitted inside belongs to this timeline."""
        ...

    def record(self) -> Any:
        """An event that has happened when everything submitted so far is done."""
        ...

    def wait(self, event: Any) -> None:
        """What is submitted from now on begins after the event. The host does not wait."""
        ...


class HostTimeline:
    """Work on the CPU is done when it is submitted."""

    @contextmanager
    def use(self) -> Iterator[None]:
        yield

    def record(self) -> None:
        return None

    def wait(self, event: None) -> None:
        return None


class StreamTimeline:
    """A stream of a GPU, CUDA's or ROCm's; None: whichever is current at each call."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._stream if self._stream is not None else torch.cuda.current_stream()

    def use(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)


def timelines(device: torch.device) -> tuple[Timeline, Timeline]:
    """Of computation and of copies."""
    if device.type == "cpu":
        return HostTimeline(), HostTimeline()
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return StreamTimeline(), StreamTimeline(copies)
