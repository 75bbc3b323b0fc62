"""What a prefill step takes of a GPU's memory, measured by doing one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from freetoken.engine.forward_batch import LAST_TOKEN, Span, build_batch
from freetoken.kernels.base import Ops
from freetoken.kvcache import KVCache, pages_for
from freetoken.models import Decoder
from freetoken.models.batch import ForwardBatch, Phase

# Beyond the measured peak: memory between blocks, and sequences that are divided otherwise.
_MARGIN = 1 / 8


def measured_headroom(
    decoder: Decoder, ops: Ops, *, tokens: int, sequences: int, page_tokens: int
) -> int:
    """Bytes that a prefill of `tokens` tokens in `sequences` sequences allocates at its peak,
    beside weights and cache, and an eighth. The decoder's operators must be a GPU's. Experts that
    pass through are counted, as in any step; the caller resets the counts."""
    tokens = min(tokens, sequences * decoder.spec.context_tokens)
    attention = decoder.spec.attention
    batch = _full_batch(tokens, sequences, page_tokens)
    kv = KVCache(
        layers=decoder.spec.layers,
        pages=int(batch.block_table.max()) + 1,
        page_tokens=page_tokens,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        device=ops.device,
        dtype=ops.cache_dtype,
    )

    def step() -> None:
        with torch.inference_mode():
            decoder.forward(batch, kv)

    return int(peak_bytes(step, ops.device) * (1 + _MARGIN))


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """Device memory that `work` has in use at most, above what is in use before it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _full_batch(tokens: int, sequences: int, page_tokens: int) -> ForwardBatch:
    """Sequences of equal length, but for a rest; the last token's logits of each are asked for."""
    spans, next_page = [], 1
    for index in range(min(sequences, tokens)):
        count = tokens // sequences + (index < tokens % sequences)
        pages = range(next_page, next_page + pages_for(count, page_tokens))
        next_page = pages.stop
        spans.append(Span([0] * count, 0, pages, LAST_TOKEN))
    return build_batch(Phase.PREFILL, spans, page_tokens)
