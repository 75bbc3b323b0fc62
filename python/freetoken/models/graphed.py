"""Decode steps on a GPU as replays of captured graphs, one for each of a ladder of batch sizes.

A step is a few hundred short launches, and the host takes longer to make them than the GPU to run
them. A graph is one launch. It holds addresses and shapes, so a batch is padded to a rung of the
ladder, and what it says is copied to where the graph looks for it: as one piece of pinned memory,
by the first thing that the graph does.

A rung's first step is computed eagerly, which compiles kernels and pins memory; its second is
captured and then replayed, as are all that follow. So start-up captures nothing, and a rung that is
never met costs nothing. Frameworks that capture every size at start begin with the largest, whose
memory the smaller ones then share; here a larger rung that comes later adds to the pool what it
needs beyond the others, which for a decode step's activations is little.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freetoken.kernels.base import Ops
from freetoken.kvcache import KVCache
from freetoken.models.batch import ForwardBatch, Phase
from freetoken.models.decoder import Decoder
from freetoken.moe import OffloadMoeRuntime
from freetoken.moe.step_guard import NoGuard, StepGuard
from freetoken.platforms.graphs import Graph, GraphDevice

_log = logging.getLogger(__name__)

_SMALL_RUNGS = (1, 2, 4)  # then every multiple of 8
_LARGEST_RUNG = 256  # beyond it a step's launches cost little beside its work
_ALIGNMENT_BYTES = 16  # of every input: kernels are compiled once more for less
_HOST = torch.device("cpu")


def ladder(max_running: int) -> tuple[int, ...]:
    """The batch sizes that have graphs: 1, 2, 4, 8, 16, 24, 32, ... and `max_running` itself."""
    largest = min(max_running, _LARGEST_RUNG)
    rungs = (*_SMALL_RUNGS, *range(8, largest + 8, 8))
    return tuple(sorted({min(rung, largest) for rung in rungs}))


def wrap_decoder(
    decoder: Decoder,
    ops: Ops,
    runtime: OffloadMoeRuntime | None,
    graphs: GraphDevice | None,
    guard: StepGuard | None,
    max_running: int,
) -> GraphedDecoder:
    """The decoder for a GPU's engine. `graphs`: None where the platform's are not safe; `guard`:
    None where a step has nobody to ask. Close it before the runtime."""
    if graphs is not None and guard is not None and not guard.capturable:
        _log.warning(
            "decode graphs are off: no way was found for a graph to wait for the CPU's experts here"
        )
        graphs = None
    return GraphedDecoder(decoder, ops, runtime, graphs, guard or NoGuard(), max_running)


class GraphedDecoder:
    """A decoder whose decode steps are replayed where they can be; anything else runs as it is.

    Every step is asked for its errors before its logits are handed out. Those of a decode step are
    valid until the next one.
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        runtime: OffloadMoeRuntime | None,
        graphs: GraphDevice | None,
        guard: StepGuard,
        max_running: int,
    ) -> None:
        self._decoder = decoder
        self._ops = ops
        self._runtime = runtime
        self._graphs = graphs
        self._guard = guard
        self._ladder = ladder(max_running)
        self._steps: dict[int, _Step] = {}  # by rung
        self._kv: KVCache | None = None  # that the steps are for
        self._logits: Tensor | None = None  # of whichever graph was replayed last
        # A step that failed may leave something for the next one to tidy up, which a graph would
        # then do at every replay.
        self._is_tidy = True

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits float32 [R, vocab] of the tokens `batch.logit_rows`. Writes `kv`. Raises
        HandshakeError if the CPU's part of the step did not come, and what a cache on the device
        has marked (ValueError, ConfigError, CapacityError)."""
        may_capture, self._is_tidy = self._is_tidy, False
        try:
            logits = self._forward(batch, kv, may_capture)
        finally:
            self._guard.after_step()
        self._is_tidy = True
        return logits

    def close(self) -> None:
        """Let go of all graphs. What they captured must still be there."""
        if self._graphs is not None:
            self._graphs.synchronize()
        steps, self._steps = self._steps, {}
        for step in steps.values():
            if step.graph is not None:
                step.graph.close()

    def _forward(self, batch: ForwardBatch, kv: KVCache, may_capture: bool) -> Tensor:
        rung = self._rung(batch, kv)
        if self._graphs is None or rung is None:
            return self._decoder.forward(batch, kv)
        step = self._step(rung, kv, self._graphs)
        self._graphs.synchronize()  # the step before may not have read its inputs yet
        step.inputs.fill(batch)
        if may_capture and step.is_warm and not step.is_refused and step.graph is None:
            self._capture(step, kv, self._graphs)
        return self._run(step, kv)[: len(batch.token_ids)]

    def _rung(self, batch: ForwardBatch, kv: KVCache) -> int | None:
        """What the batch is padded to; None: it is not for a graph."""
        tokens = len(batch.token_ids)
        if (
            batch.phase is not Phase.DECODE
            or tokens > self._ladder[-1]
            or len(batch.logit_rows) != tokens
            or batch.block_table.shape[1] > self._most_pages(kv)
        ):
            return None
        rung = self._ladder[bisect_left(self._ladder, tokens)]
        reads_host = self._runtime is not None and not self._runtime.can_capture_decode(rung)
        return None if reads_host else rung

    def _most_pages(self, kv: KVCache) -> int:
        return kv.most_pages(self._decoder.spec.context_tokens)

    def _step(self, rung: int, kv: KVCache, graphs: GraphDevice) -> _Step:
        if kv is not self._kv:
            self.close()
            self._kv = kv
        step = self._steps.get(rung)
        if step is None:
            inputs = _Inputs(rung, self._most_pages(kv), graphs, self._ops.device)
            step = self._steps[rung] = _Step(rung, inputs)
        return step

    def _run(self, step: _Step, kv: KVCache) -> Tensor:
        if step.graph is not None:
            with self._guard.replaying(step.handshakes):
                return step.graph.replay()
        logits = self._eagerly(step, kv)
        step.is_warm = True
        return logits

    def _eagerly(self, step: _Step, kv: KVCache) -> Tensor:
        step.inputs.send()
        return self._decoder.forward(step.inputs.batch, kv)

    def _capture(self, step: _Step, kv: KVCache, graphs: GraphDevice) -> None:
        before = self._guard.handshakes
        logits = self._shared_logits()[: step.rung]
        try:
            step.graph = graphs.capture(lambda: logits.copy_(self._eagerly(step, kv)))
        except Exception as error:  # whatever it was: the step can be computed without
            step.is_refused = True
            _log.warning(
                "decode steps of up to %d sequences run without a graph, for its capture failed: "
                "%s: %s",
                step.rung,
                type(error).__name__,
                error,
            )
        step.handshakes = self._guard.handshakes - before

    def _shared_logits(self) -> Tensor:
        """Where every graph leaves its result: one of its own for each would be a vocabulary for
        each row of the whole ladder."""
        if self._logits is None:
            shape = (self._ladder[-1], self._decoder.spec.vocab)
            with torch.inference_mode(False):  # it is written to in either mode
                self._logits = torch.empty(shape, device=self._ops.device)
        return self._logits


@dataclass
class _Step:
    """One rung: its inputs, and its graph once there is one, with the handshakes in it."""

    rung: int
    inputs: _Inputs
    is_warm: bool = False
    is_refused: bool = False
    graph: Graph | None = None
    handshakes: int = 0


class _Inputs:
    """Where a rung's step finds its batch: on the device, and in pinned memory before.

    Row i is sequence i, with row i of the block table; rows that are nobody's have sequence -1.
    """

    def __init__(self, rung: int, pages: int, graphs: GraphDevice, device: torch.device) -> None:
        with torch.inference_mode(False):  # they are written to in either mode
            self._pinned = graphs.pinned((_input_bytes(rung, pages),), torch.uint8)
            self._on_device = torch.zeros_like(self._pinned, device=device)
            self._host = _batch_in(self._pinned, rung, pages)
            self.batch = _batch_in(self._on_device, rung, pages)

    def fill(self, batch: ForwardBatch) -> None:
        """Write a batch and its padding to pinned memory. Entries of the block table beyond those
        of the batch are left: no position reaches them."""
        batch = batch.to(_HOST)
        tokens, used = len(batch.token_ids), batch.block_table.shape[1]
        sequence = batch.sequence.numpy()
        for standing, new, padding in (
            (self._host.token_ids, batch.token_ids.numpy(), 0),
            (self._host.kv_slots, batch.kv_slots.numpy(), 0),  # of the page that is nobody's
            (self._host.positions, batch.positions.numpy(), 0),
            (self._host.sequence, np.where(sequence < 0, -1, np.arange(tokens)), -1),
        ):
            rows = standing.numpy()
            rows[:tokens] = new
            rows[tokens:] = padding
        self._host.block_table.numpy()[:tokens, :used] = batch.block_table.numpy()[sequence]

    def send(self) -> None:
        """Copy to the device, in the order of the current stream."""
        self._on_device.copy_(self._pinned, non_blocking=True)


def _input_layout(rung: int, pages: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Of token_ids, kv_slots, positions, sequence and block_table, which follow one another."""
    row = (rung,)
    wide, narrow = torch.int64, torch.int32
    return [(wide, row), (wide, row), (narrow, row), (narrow, row), (narrow, (rung, pages))]


def _input_bytes(rung: int, pages: int) -> int:
    return sum(_aligned_bytes(*entry) for entry in _input_layout(rung, pages))


def _aligned_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    size_bytes = dtype.itemsize * math.prod(shape)
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _batch_in(memory: Tensor, rung: int, pages: int) -> ForwardBatch:
    """A decode batch of `rung` rows whose tensors lie in uint8 memory."""
    views, start = [], 0
    for dtype, shape in _input_layout(rung, pages):
        size_bytes = dtype.itemsize * math.prod(shape)
        views.append(memory[start : start + size_bytes].view(dtype).view(shape))
        start += _aligned_bytes(dtype, shape)
    token_ids, kv_slots, positions, sequence, block_table = views
    return ForwardBatch(
        phase=Phase.DECODE,
        token_ids=token_ids,
        positions=positions,
        sequence=sequence,
        kv_slots=kv_slots,
        block_table=block_table,
        logit_rows=torch.arange(rung, device=memory.device),
        may_be_padded=True,
    )
