"""Prefill on a GPU: experts pass through two buffers and leave the slots as they are.

Many tokens ask for nearly all experts of a layer. Fetched into slots they would throw out what
decode keeps there; so whole layers are streamed instead, layer l + 1 while layer l computes. A few
tokens bring only the experts that they use, marked on the device. Nothing is read on the host,
but for a few tokens and a layer whose records the device cannot read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from freetoken.kernels.base import ExpertMath
from freetoken.kernels.triton.copy import copy_layer, copy_layer_by_engine, copy_used_plain
from freetoken.kernels.triton.lru import PENDING
from freetoken.moe.device_cache import DeviceMoeCache
from freetoken.moe.stats import mark_active
from freetoken.moe.store import BindRecords, PackedExpertStore, SlotPool
from freetoken.moe.timeline import Timeline
from freetoken.platforms.base import SlotMemory

# From so many routes per expert on, whole layers: of uniform routes two per expert use 86% of the
# experts, and a whole layer can come while the one before computes.
WHOLE_ROUTES_PER_EXPERT = 2

# Experts in slots need not cross the bus, but then a kernel must do the copying, beside the
# experts' own kernels. If less than this share of a layer has a slot, the copy engine does it.
KERNEL_SLOT_SHARE = 1 / 8


@dataclass
class _Buffer:
    """Records of one layer. `holds`: the layer of which all experts are in it, or are on the way;
    `copied` and `computed`: the last writing and reading of it, None before the first."""

    memory: Tensor
    holds: int | None = None
    copied: Any = None
    computed: Any = None


class PrefillStream:
    """Prefill of one model whose cache is a DeviceMoeCache.

    A pass calls `prefill` for layers 0, 1, ... in order; a pass that failed halfway needs no care.
    """

    def __init__(
        self,
        store: PackedExpertStore,
        pool: SlotPool,
        cache: DeviceMoeCache,
        memory: SlotMemory,
        *,
        bind: BindRecords,
        timelines: tuple[Timeline, Timeline],
    ) -> None:
        """`bind` makes the kernel of a buffer's records; `timelines` are the computation's and the
        copies'. Raises CapacityError if there is no room for two layers' experts."""
        self._store = store
        self._pool = pool
        self._cache = cache
        self.counter = cache.new_counter()
        self._compute, self._copy = timelines
        sizes = [store.records(layer_id).nbytes for layer_id in range(store.layers)]
        self._buffers = [_Buffer(memory.allocate_slots(max(sizes))) for _ in range(2)]
        self._rows = [self._view(layer_id) for layer_id in range(store.layers)]
        self._kernels: Sequence[ExpertMath] = [
            bind(store.layouts[layer_id], rows) for layer_id, rows in enumerate(self._rows)
        ]

    def _view(self, layer_id: int) -> Tensor:
        """A layer's place in its buffer, uint8 [E, record_bytes]."""
        records = self._store.records(layer_id)
        return self._buffer(layer_id).memory[: records.nbytes].view(records.shape)

    def _buffer(self, layer_id: int) -> _Buffer:
        return self._buffers[layer_id % 2]

    def prefill(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """As ExpertStrategy.prefill. The ids are not rewritten."""
        if layer_id == 0:  # whatever an earlier pass has left is of no use
            for buffer in self._buffers:
                buffer.holds = None
        experts = len(self._rows[layer_id])
        used = mark_active(topk_ids, experts)
        if topk_ids.numel() >= WHOLE_ROUTES_PER_EXPERT * experts:
            self._bring_whole(layer_id)
        else:
            self._bring_used(layer_id, used)
        weights = topk_weights.masked_fill(topk_ids < 0, 0.0)
        out = self._kernels[layer_id](hidden_states, weights, topk_ids)
        self._buffer(layer_id).computed = self._compute.record()
        self._count(layer_id, used)
        return out

    def _bring_whole(self, layer_id: int) -> None:
        """Computation waits for this layer's experts, and the next layer's are on their way."""
        buffer = self._buffer(layer_id)
        if buffer.holds != layer_id:
            self._copy.wait(self._compute.record())  # slots that decode has filled are filled
            self._start(layer_id)
        if layer_id + 1 < self._store.layers:
            self._start(layer_id + 1)
        self._compute.wait(buffer.copied)

    def _start(self, layer_id: int) -> None:
        """Copy a layer into its buffer as soon as nothing reads that any more."""
        buffer = self._buffer(layer_id)
        if buffer.computed is not None:
            self._copy.wait(buffer.computed)
        buffer.holds = None
        with self._copy.use():
            self._copy_all(layer_id)
            buffer.copied = self._copy.record()
        buffer.holds = layer_id

    def _copy_all(self, layer_id: int) -> None:
        records, rows = self._store.records(layer_id), self._rows[layer_id]
        is_plain = layer_id in self._store.plain_layers
        if is_plain or self._pool.slots < KERNEL_SLOT_SHARE * len(rows):
            copy_layer_by_engine(records, rows)
        else:
            slots = self._pool.records(layer_id)
            copy_layer(self._cache.state(layer_id), records, slots, rows)

    def _bring_used(self, layer_id: int, used: Tensor) -> None:
        """Copies in line with the computation, for which experts is known only now."""
        buffer = self._buffer(layer_id)
        if buffer.copied is not None:
            self._compute.wait(buffer.copied)
        buffer.holds = None
        records, slots = self._store.records(layer_id), self._pool.records(layer_id)
        with self._compute.use():
            if layer_id in self._store.plain_layers:
                copy_used_plain(used, records, self._rows[layer_id])
                return
            copy_layer(self._cache.state(layer_id), records, slots, self._rows[layer_id], used)

    def _count(self, layer_id: int, used: Tensor) -> None:
        """Experts in use that a slot held count as hits, the others as fetched."""
        state = self._cache.state(layer_id)
        in_slot = (state.slot_of >= 0) & (state.status[PENDING] == 0)
        row, hits = self.counter.row(layer_id), (used * in_slot).sum()
        row[0] += 1
        row[1] += hits
        row[2] += used.sum() - hits
