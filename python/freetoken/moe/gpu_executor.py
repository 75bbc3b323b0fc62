"""Experts on the CPU's worker pool, between the operations of a GPU stream.

The contract of `CpuMoeExecutor`, for tensors on a device. Nothing here waits for the GPU: inputs
are copied to pinned memory on the current stream, a handshake starts the work when they are there,
and its result is copied back behind the handshake's end. So a graph can capture the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freetoken import _native
from freetoken.kernels.cpu import CpuExpertKernel
from freetoken.platforms.streams import GpuStreams


@dataclass(eq=False)
class _Staging:
    """Pinned memory of one batch size, and where its result goes on the device."""

    hidden: Tensor
    weights: Tensor
    ids: Tensor
    out: Tensor
    result: Tensor
    slots: dict[int, int] = field(default_factory=dict)  # of the handshake, by layer
    used: bool = False


class PendingGpuDecode:
    """CPU work on a stream. Belongs to the executor that made it, which syncs it exactly once."""

    __slots__ = ("slot", "staging")

    def __init__(self, slot: int, staging: _Staging) -> None:
        self.slot = slot
        self.staging = staging


class GpuCpuMoeExecutor:
    """Runs the experts of any layer on the CPU for a device that goes on meanwhile.

    `kernels` has one CPU kernel per MoE layer, all of the pool that `handshake` was made for.
    Shapes as in ExpertKernel, on the device: hidden_states float32 [T, H], topk_weights float32
    [T, K], topk_ids int32 [T, K] where -1 is skipped; results are float64 [T, H].

    What a failed job should have given is NaN, and `check` raises: call it when the stream is
    synchronised, before a step's results are used.
    """

    def __init__(
        self,
        kernels: Sequence[CpuExpertKernel],
        handshake: _native.GpuHandshake,
        streams: GpuStreams,
    ) -> None:
        self._kernels = tuple(kernels)
        self._handshake = handshake
        self._streams = streams
        # All layers share the memory of a batch size: the stream fills it for the next layer only
        # after it took the result of the one before. Work that is pending beside other work has its
        # own, so there is a list of them.
        self._staging: dict[tuple[int, int, int], list[_Staging]] = {}
        self._pending: set[PendingGpuDecode] = set()
        self._submits = 0

    def decode_submit(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> PendingGpuDecode:
        """Put the work on the current stream. If this raises, nothing is pending.

        The first time that a layer meets a batch size, memory is pinned: run such a step eagerly
        before it is captured. Raises RuntimeError otherwise, and HandshakeError after a failure.
        """
        staging = self._free_staging(hidden_states, topk_weights)
        slot = self._slot(layer_id, staging)
        self._streams.copy(staging.hidden, hidden_states)
        self._streams.copy(staging.weights, topk_weights)
        self._streams.copy(staging.ids, topk_ids)
        self._handshake.submit(slot, self._streams.current())
        self._submits += 1
        staging.used = True
        pending = PendingGpuDecode(slot, staging)
        self._pending.add(pending)
        return pending

    def decode_sync(self, pending: PendingGpuDecode) -> Tensor:
        """Put the wait for the work on the current stream and return where its result will be.

        That tensor is overwritten by the next sync of this batch size. The work is pending no more,
        also if this raises. Raises RuntimeError for work that was synced before or that is another
        executor's.
        """
        if pending not in self._pending:
            raise RuntimeError(
                "this CPU work is not pending here; each decode_submit is synced exactly once"
            )
        self._pending.remove(pending)
        staging = pending.staging
        staging.used = False
        self._handshake.wait(pending.slot, self._streams.current())
        self._streams.copy(staging.result, staging.out)
        return staging.result

    def decode(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """The same in one call."""
        return self.decode_sync(self.decode_submit(layer_id, hidden_states, topk_weights, topk_ids))

    def prefill(
        self, layer_id: int, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """The same for any number of tokens, with the host waiting: for steps that are not
        captured, and whose sizes do not come again."""
        host = [x.cpu() for x in (hidden_states, topk_weights, topk_ids)]
        return self._kernels[layer_id](*host).to(hidden_states.device)

    @property
    def pending(self) -> int:
        """How many submitted works wait for their sync."""
        return len(self._pending)

    @property
    def capturable(self) -> bool:
        """Whether a graph may capture the calls; if not, a submit inside a capture raises."""
        return self._handshake.capturable

    @property
    def submits(self) -> int:
        """How many works were put on streams, captured ones counted once."""
        return self._submits

    def announce(self, handshakes: int) -> None:
        """A graph that captured so many submits is about to be launched: if they do not come, the
        watchdog makes that an error. Negative: so many of them were not launched after all."""
        self._handshake.announce(handshakes)

    def check(self) -> None:
        """Raise HandshakeError if any work since the last check failed: its step has no result."""
        self._handshake.check()

    def clear(self) -> None:
        """Go on after a failed job. The streams must be idle."""
        self._handshake.clear()

    def close(self) -> None:
        """Wait for whatever is on the streams. Call once, when no graph with this work is left."""
        try:
            while self._pending:
                self.decode_sync(next(iter(self._pending)))
        finally:
            self._handshake.close()
            self._kernels = ()
            self._staging.clear()

    def _free_staging(self, hidden_states: Tensor, topk_weights: Tensor) -> _Staging:
        tokens, hidden = hidden_states.shape
        top_k = topk_weights.shape[1]
        sets = self._staging.setdefault((tokens, hidden, top_k), [])
        for staging in sets:
            if not staging.used:
                return staging
        self._refuse_if_capturing(tokens)
        pinned = self._streams.pinned
        device = hidden_states.device
        sets.append(
            _Staging(
                hidden=pinned((tokens, hidden), torch.float32),
                weights=pinned((tokens, top_k), torch.float32),
                ids=pinned((tokens, top_k), torch.int32),
                out=pinned((tokens, hidden), torch.float64),
                result=torch.zeros(tokens, hidden, dtype=torch.float64, device=device),
            )
        )
        return sets[-1]

    def _slot(self, layer_id: int, staging: _Staging) -> int:
        slot = staging.slots.get(layer_id)
        if slot is None:
            tokens = len(staging.hidden)
            self._refuse_if_capturing(tokens)
            slot = staging.slots[layer_id] = self._kernels[layer_id].add_to(
                self._handshake,
                staging.hidden,
                staging.weights,
                staging.ids,
                staging.out,
                f"layer {layer_id}, {tokens} tokens",
            )
        return slot

    def _refuse_if_capturing(self, tokens: int) -> None:
        if self._streams.capturing():
            raise RuntimeError(
                f"found a first step of {tokens} tokens inside a graph capture, expected its "
                "memory to be pinned already; run one eager step of this batch size before "
                "capturing it"
            )
