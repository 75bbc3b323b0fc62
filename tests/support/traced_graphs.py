"""A GPU's graphs without a GPU: what captured work does to tensors is written down, and done again.

As on a GPU, a capture changes nothing that was there before, a replay runs none of the Python that
put the work together, a result lasts until the next replay, and reading a value while capturing is
an error. Operators of torch are seen as they are dispatched; what stands for one piece of work on
the device (an operator of freetoken, a call of the cache) goes through `TracedGraphs.call`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from freetoken import _native
from freetoken.moe import OffloadMoeRuntime
from freetoken.moe.hybrid_decode import HybridDecodeExecutor
from support.host_reads import HostReads


class TracedGraphs:
    """GraphDevice on CPU tensors. `capture_errors` are raised by the next captures, at their end:
    as a driver's are, with all work recorded."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0
        self.capture_errors: list[Exception] = []
        self.replay_errors: list[Exception] = []
        self.is_replaying = False
        self._graphs: list[TracedGraph] = []
        self._recorder: _Recorder | None = None
        self._in_flight: list[tuple[Tensor, Tensor]] = []  # pinned memory, and what it held
        self._pinned: list[Tensor] = []

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._pinned.append(torch.zeros(shape, dtype=dtype))
        return self._pinned[-1]

    def capture(self, work: Callable[[], Tensor]) -> TracedGraph:
        recorder = self._recorder = _Recorder()
        try:
            with _NoReads(recorder), recorder:
                output = work()
            if self.capture_errors:
                raise self.capture_errors.pop()
        finally:
            self._recorder = None
            recorder.restore()
        self.captures += 1
        self._graphs.append(TracedGraph(self, recorder, output))
        return self._graphs[-1]

    def synchronize(self) -> None:
        self._check_pinned()
        self._in_flight.clear()

    @property
    def is_busy(self) -> bool:
        """Whether a replay may still run."""
        return bool(self._in_flight)

    def _check_pinned(self) -> None:
        for memory, held in self._in_flight:
            assert torch.equal(memory, held), "pinned memory was written to, and not read yet"

    @contextmanager
    def launched(self) -> Iterator[None]:
        if self.replay_errors:
            raise self.replay_errors.pop()
        self._check_pinned()
        self._in_flight = [(memory, memory.clone()) for memory in self._pinned]
        for graph in self._graphs:
            graph.output.untyped_storage().fill_(255)
        self.replays += 1
        self.is_replaying = True
        try:
            yield
        finally:
            self.is_replaying = False

    @property
    def open_graphs(self) -> int:
        return sum(not graph.is_closed for graph in self._graphs)

    def call(
        self,
        work: Callable[..., Any],
        *arguments: Any,
        at_capture: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Any:
        """One piece of work on the device. While capturing, `at_capture` stands for it, where it
        changes more than what it returns: it gives a result of the same shape."""
        recorder = self._recorder
        if recorder is None or recorder.is_paused:
            return work(*arguments, **options)
        with recorder.paused(), _disable_current_modes():
            result = (at_capture or work)(*arguments, **options)
        recorder.add(work, arguments, options, result)
        return result


class TracedGraph:
    """Written down work and its result. A replay first spoils what it is to compute anew."""

    def __init__(self, device: TracedGraphs, recorder: _Recorder, output: Tensor) -> None:
        self._device = device
        self._recorder = recorder
        self.output = output
        self.is_closed = False

    def replay(self) -> Tensor:
        assert not self.is_closed
        with self._device.launched():
            self._recorder.replay()
        return self.output

    def close(self) -> None:
        self.is_closed = True


class _Recorder(TorchDispatchMode):
    """Runs operators and writes them down."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False
        self._work: list[Callable[[], None]] = []
        self._made: dict[int, torch.UntypedStorage] = {}  # while capturing, by address
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if self.is_paused:
            return func(*args, **options)
        assert func is not torch.ops.aten._local_scalar_dense.default, "a device value is read"
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        result = func(*args, **options)
        self.add(func, args, options, result)
        return result

    def add(self, work: Any, arguments: Any, options: Any, result: Any) -> None:
        given = {_address(tensor) for tensor in _tensors([arguments, list(options.values())])}
        for tensor in _tensors(result):
            if _address(tensor) not in given:
                self._made[_address(tensor)] = tensor.untyped_storage()
        self._work.append(lambda: _update(result, work(*arguments, **options)))

    def _keep(self, tensor: Tensor) -> None:
        """Before what was there before the capture is written to."""
        address = _address(tensor)
        if address not in self._made and address not in self._kept:
            storage = tensor.untyped_storage()
            self._kept[address] = storage, storage.clone()

    def restore(self) -> None:
        for storage, before in self._kept.values():
            storage.copy_(before)

    def replay(self) -> None:
        for storage in self._made.values():
            storage.fill_(255)  # NaN, or -1
        for work in self._work:
            work()


class _NoReads(HostReads):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._recorder.is_paused:
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _update(result: Any, new: Any) -> None:
    for old, tensor in zip(_tensors(result), _tensors(new), strict=True):
        if _address(old) != _address(tensor):
            old.copy_(tensor)


# What of freetoken runs on the device ----------------------------------------------------------


class _Traced:
    """Another object's attributes."""

    def __init__(self, graphs: TracedGraphs, inner: Any) -> None:
        self._graphs = graphs
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


class TracedOps(_Traced):
    """Ops of the CPU in place of a GPU's."""

    PURE = frozenset(
        {"linear", "linear_group", "embed", "rms_norm", "add_rms_norm", "gated_activation"}
        | {"rotary_", "paged_attention", "to_float32", "route_topk"}
    )

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self.PURE:
            return found
        return lambda *arguments, **options: self._graphs.call(found, *arguments, **options)

    def write_kv(self, *arguments: Tensor) -> None:
        self._graphs.call(self._inner.write_kv, *arguments, at_capture=_nothing)

    def expert_kernel(self, bank: Any) -> _TracedKernel:
        return _TracedKernel(self._graphs, self._inner.expert_kernel(bank))


class _TracedKernel(_Traced):
    def __call__(self, *arguments: Tensor) -> Tensor:
        result: Tensor = self._graphs.call(self._inner, *arguments)
        return result


class _TracedCounter(_Traced):
    def add_routes(self, *arguments: Any, on_cpu: bool) -> None:
        self._graphs.call(self._inner.add_routes, *arguments, on_cpu=on_cpu, at_capture=_nothing)


class _TracedCache(_Traced):
    """Nothing is assigned, copied or counted by a capture."""

    def ensure_experts(self, layer_id: int, topk_ids: Tensor) -> None:
        self._ensure(self._inner.ensure_experts, layer_id, topk_ids)

    def ensure_experts_hybrid(self, layer_id: int, topk_ids: Tensor) -> None:
        self._ensure(self._inner.ensure_experts_hybrid, layer_id, topk_ids)

    def _ensure(self, ensure: Callable[[int, Tensor], None], layer_id: int, ids: Tensor) -> None:
        self._graphs.call(ensure, layer_id, ids, at_capture=lambda _, ids: [ids.fill_(-1), None][1])

    def copy_missing(self) -> None:
        self._graphs.call(self._inner.copy_missing, at_capture=_nothing)

    def record_stats(self, layer_id: int) -> None:
        self._graphs.call(self._inner.record_stats, layer_id, at_capture=_nothing)

    def record_into(self, counter: Any, layer_id: int, *, steps: int = 1) -> None:
        record = self._inner.record_into
        self._graphs.call(record, counter, layer_id, steps=steps, at_capture=_nothing)


class TracedExecutor(_Traced):
    """The CPU's executor behind handshakes. Replayed submits must have been announced.

    `failures` of the jobs to come: each is found by the next `check`.
    """

    capturable = True

    def __init__(self, graphs: TracedGraphs, inner: Any) -> None:
        super().__init__(graphs, inner)
        self.submits = 0
        self.expected = 0
        self.failures: list[str] = []
        self.cleared = 0

    def decode_submit(self, layer_id: int, hidden: Tensor, *routes: Tensor) -> Any:
        self.submits += 1
        pending: list[Any] = []

        def submit(*arguments: Any) -> None:
            if self._graphs.is_replaying:
                assert self.expected > 0, "a handshake that nobody announced"
                self.expected -= 1
            pending.append(self._inner.decode_submit(*arguments))

        self._graphs.call(submit, layer_id, hidden, *routes, at_capture=_nothing)
        return pending, hidden

    def decode_sync(self, submitted: Any) -> Tensor:
        pending, hidden = submitted
        result: Tensor = self._graphs.call(
            lambda: self._inner.decode_sync(pending.pop()),
            at_capture=lambda: torch.zeros_like(hidden, dtype=torch.float64),
        )
        return result

    def decode(self, *arguments: Any) -> Tensor:
        return self.decode_sync(self.decode_submit(*arguments))

    def announce(self, handshakes: int) -> None:
        self.expected += handshakes

    def check(self) -> None:
        assert not self._graphs.is_busy, "the step may yet fail"
        if self.failures:
            raise _native.HandshakeError(self.failures[0])
        assert self.expected == 0, f"{self.expected} handshakes were announced and did not come"

    def clear(self) -> None:
        self.failures.clear()
        self.expected = 0
        self.cleared += 1


def trace_runtime(graphs: TracedGraphs, runtime: OffloadMoeRuntime) -> TracedExecutor | None:
    """Let graphs see what strategies take from a runtime. Returns its CPU executor, if any."""
    runtime.decode_counter = _TracedCounter(graphs, runtime.decode_counter)
    cache = runtime._cache
    if cache is not None:
        runtime._cache = cache = _TracedCache(graphs, cache)  # type: ignore[assignment]
    if runtime._cpu is None:
        return None
    executor = TracedExecutor(graphs, runtime._cpu)
    runtime._cpu = executor  # type: ignore[assignment]
    if runtime._hybrid is not None:
        assert cache is not None
        overlap = runtime._hybrid.overlap
        runtime._hybrid = HybridDecodeExecutor(cache, executor, overlap=overlap)
    return executor
