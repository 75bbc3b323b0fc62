"""Run a decoder over sequences without the engine: pages, slots and batches laid out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from freetoken.checkpoints import open_checkpoint
from freetoken.kernels.base import ExpertBank
from freetoken.kvcache import KVCache
from freetoken.models import DecoderSpec, ForwardBatch, MoeSpec, Phase, load_decoder, read_spec
from freetoken.moe.runtime import GpuExperts, MoeConfig, OffloadMoeRuntime
from freetoken.moe.store import LayerExperts
from freetoken.platforms.base import SlotMemory

PAGE_TOKENS = 3

# tiny tensors: a second thread costs more than it brings, above all on a busy machine
torch.set_num_threads(1)


class HostMemory:
    """Zeroed, 256-byte aligned memory."""

    def allocate(self, size_bytes: int, /) -> npt.NDArray[np.uint8]:
        raw = np.zeros(size_bytes + 256, np.uint8)
        start = -raw.ctypes.data % 256
        return raw[start : start + size_bytes]

    def place(self, bank: ExpertBank, *, mapped: bool) -> None:
        """All memory is as near."""

    def allocate_slots(self, size_bytes: int, /) -> torch.Tensor:
        return torch.from_numpy(self.allocate(size_bytes))

    def pin(self, memory: torch.Tensor, /) -> bool:
        return True


class Runner:
    """A loaded checkpoint and `sequences` sequences of up to `tokens` tokens, their pages
    interleaved in the cache. `fed[s]` counts the tokens of a sequence so far."""

    def __init__(
        self,
        path: Path,
        ops: Any,
        *,
        strategy: str = "cpu",
        sequences: int = 2,
        tokens: int = 48,
        memory: SlotMemory | None = None,
        gpu: GpuExperts | None = None,
        **moe: Any,
    ) -> None:
        checkpoint = open_checkpoint(path)
        self.spec: DecoderSpec = read_spec(checkpoint)
        self.runtime: OffloadMoeRuntime | None = None

        def make_moe(layers: Sequence[LayerExperts], spec: MoeSpec) -> OffloadMoeRuntime:
            config = MoeConfig(strategy=strategy, top_k=spec.top_k, **moe)
            self.runtime = OffloadMoeRuntime.create(
                layers, config, memory or HostMemory(), ops, gpu
            )
            return self.runtime

        self.decoder: Any = load_decoder(checkpoint, self.spec, ops, make_moe)
        checkpoint.close()
        pages = -(-tokens // PAGE_TOKENS)
        order = torch.arange(1, 1 + sequences * pages).flip(0)
        self._table = order.reshape(pages, sequences).T.contiguous().to(torch.int32)
        self._kv = KVCache(
            layers=self.spec.layers,
            pages=1 + sequences * pages,
            page_tokens=PAGE_TOKENS,
            kv_heads=self.spec.attention.kv_heads,
            head_dim=self.spec.attention.head_dim,
            device=ops.device,
            dtype=ops.cache_dtype,
        )
        self.fed = [0] * sequences

    def step(
        self, phase: Phase, tokens: Sequence[tuple[int, int]], *, padded_rows: int = 0
    ) -> torch.Tensor:
        """Feed (sequence, token id) pairs as one batch; logits float32 [T, vocab] of all, on the
        host.

        `padded_rows` rows that belong to nobody follow the real ones, as in a captured batch.
        """
        positions, slots = [], []
        for sequence, _ in tokens:
            position = self.fed[sequence]
            page = int(self._table[sequence, position // PAGE_TOKENS])
            positions.append(position)
            slots.append(page * PAGE_TOKENS + position % PAGE_TOKENS)
            self.fed[sequence] += 1
        padding = [0] * padded_rows
        batch = ForwardBatch(
            phase=phase,
            token_ids=torch.tensor([token for _, token in tokens] + padding),
            positions=torch.tensor(positions + padding, dtype=torch.int32),
            sequence=torch.tensor([s for s, _ in tokens] + [-1] * padded_rows, dtype=torch.int32),
            kv_slots=torch.tensor(slots + padding),
            block_table=self._table,
            logit_rows=torch.arange(len(tokens)),
            may_be_padded=padded_rows > 0,
        )
        return self.decoder.forward(batch, self._kv).cpu()

    def prefill(self, token_ids: Sequence[int], sequence: int = 0) -> torch.Tensor:
        return self.step(Phase.PREFILL, [(sequence, token) for token in token_ids])

    def decode(self, token_ids: Sequence[int], sequence: int = 0) -> torch.Tensor:
        """One token at a time."""
        return torch.cat([self.step(Phase.DECODE, [(sequence, token)]) for token in token_ids])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())
