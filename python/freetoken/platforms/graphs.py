"""Graphs of a device: work that is captured once and replayed as one launch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from freetoken.platforms.streams import PinnedMemory, TorchPinned


class Graph(Protocol):
    """Captured work. It reads and writes the same memory at every replay."""

    def replay(self) -> Tensor:
        """Launch it on the current stream, on what its inputs hold by then. Returns its result: the
        same tensor every time, valid until any graph of the same device is replayed."""
        ...

    def close(self) -> None:
        """Let go of its memory. The stream must be idle; it cannot be replayed afterwards."""
        ...


class GraphDevice(PinnedMemory, Protocol):
    """What captures graphs. They share one pool of memory, so one is replayed at a time."""

    def capture(self, work: Callable[[], Tensor]) -> Graph:
        """Call `work` and keep what it puts on the stream, which is not computed now. What `work`
        reads must stay where it is. Raises what `work` raises, or RuntimeError where it did what
        cannot be captured (say, read a device value); then nothing has changed."""
        ...

    def synchronize(self) -> None:
        """Wait until the current stream is idle."""
        ...


class TorchGraphs(TorchPinned):
    """GraphDevice of torch, for one device of either vendor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Tensor]) -> TorchGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # while it captures, the allocator gives nothing back
            # other threads, such as the one that answers handshakes, may call the driver meanwhile
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                output = work()
            except BaseException:
                with suppress(RuntimeError):  # what failed inside says more than that it did
                    graph.capture_end()
                raise
            graph.capture_end()
        return TorchGraph(graph, output)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


class TorchGraph:
    """A CUDAGraph (on ROCm too) and the tensor that it leaves its result in."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self._output = output

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._output

    def close(self) -> None:
        self._graph.reset()
