"""Decode steps that are computed as a replay of the first of their size.

Between two operators of a step Python takes longer than many an operator, above all when the
weights that streamed through have pushed it out of the caches. So the first decode step of a batch
size is recorded, on inputs and outputs that stay where they are, and the next ones are one call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.kernels.base import Ops, Recording
from freetoken.kvcache import KVCache
from freetoken.models.batch import ForwardBatch, Phase
from freetoken.models.decoder import Decoder
from freetoken.moe import OffloadMoeRuntime

# A larger batch spends its time in the operators, and a recording keeps the activations of a step.
_MOST_TOKENS = 8


class RecordedDecoder:
    """A decoder whose decode steps are recorded and replayed; anything else runs as it is.

    The logits of a decode step are valid until the next one. For operators that can record, and
    experts (`runtime`; None for a dense model) whose decode is nothing but operators.
    """

    def __init__(self, decoder: Decoder, ops: Ops, runtime: OffloadMoeRuntime | None) -> None:
        self._decoder = decoder
        self._ops = ops
        self._runtime = runtime
        self._steps: dict[tuple[int, int], _Step] = {}  # by numbers of tokens and sequences
        self._kv: KVCache | None = None  # that the steps were recorded with

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits float32 [R, vocab] of the tokens `batch.logit_rows`. Writes `kv`."""
        tokens = len(batch.token_ids)
        if (
            batch.phase is not Phase.DECODE
            or tokens > _MOST_TOKENS
            or len(batch.logit_rows) != tokens
            or batch.may_be_padded
        ):
            return self._decoder.forward(batch, kv)
        if kv is not self._kv:
            self._steps, self._kv = {}, kv
        size = (tokens, len(batch.block_table))
        step = self._steps.get(size)
        if step is None:
            step = self._record(batch, kv)
            self._steps[size] = step
        else:
            _copy(batch, self._decoder.rotations(batch.positions), step)
            step.recording.replay()
            if self._runtime is not None:
                for layer_id, ids in step.routes.items():
                    self._runtime.count_decode(layer_id, ids)
        return step.logits

    def _record(self, batch: ForwardBatch, kv: KVCache) -> _Step:
        inputs = _standing(batch, kv.most_pages(self._decoder.spec.context_tokens))
        rotations = self._decoder.rotations(batch.positions)
        logits, recording = self._ops.record(lambda: self._decoder.forward(inputs, kv, rotations))
        routes = {} if self._runtime is None else self._runtime.decode_ids()
        return _Step(inputs, rotations, logits, routes, recording)


@dataclass(frozen=True)
class _Step:
    """What a recording reads and writes. `routes`: each MoE layer's ids."""

    inputs: ForwardBatch
    rotations: tuple[Tensor, Tensor]
    logits: Tensor
    routes: dict[int, Tensor]
    recording: Recording


def _standing(batch: ForwardBatch, pages: int) -> ForwardBatch:
    """A copy of the batch with room in the block table for the longest sequences."""
    sequences, used = batch.block_table.shape
    table = torch.zeros((sequences, max(pages, used)), dtype=torch.int32)
    table[:, :used] = batch.block_table
    return ForwardBatch(
        phase=batch.phase,
        token_ids=batch.token_ids.clone(),
        positions=batch.positions.clone(),
        sequence=batch.sequence.clone(),
        kv_slots=batch.kv_slots.clone(),
        block_table=table,
        logit_rows=batch.logit_rows,
    )


def _copy(batch: ForwardBatch, rotations: tuple[Tensor, Tensor], step: _Step) -> None:
    """Entries of the block table beyond those of the batch are left: no position reaches them."""
    to = step.inputs
    to.token_ids.copy_(batch.token_ids)
    to.positions.copy_(batch.positions)
    to.sequence.copy_(batch.sequence)
    to.kv_slots.copy_(batch.kv_slots)
    to.block_table[:, : batch.block_table.shape[1]] = batch.block_table
    for standing, new in zip(step.rotations, rotations, strict=True):
        standing.copy_(new)
