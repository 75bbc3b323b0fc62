"""From a step's plan to the tensors that a decoder takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from freetoken.kvcache import pages_for
from freetoken.models.batch import ForwardBatch, Phase


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence, whose first is at position `start`.

    `pages` are the sequence's pages from position 0 on; `logits` says which of the tokens' logits
    are wanted.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    logits: slice


LAST_TOKEN = slice(-1, None)
NO_TOKEN = slice(0, 0)
EVERY_TOKEN = slice(None)


def build_batch(phase: Phase, spans: Sequence[Span], page_tokens: int) -> ForwardBatch:
    """Flatten spans into a ForwardBatch: one row of the block table per span."""
    counts = [len(span.token_ids) for span in spans]
    token_ids = np.fromiter((token for span in spans for token in span.token_ids), dtype=np.int64)
    positions = np.concatenate(
        [np.arange(span.start, span.start + n) for span, n in zip(spans, counts, strict=True)]
    )
    sequence = np.repeat(np.arange(len(spans)), counts)
    block_table = _block_table(spans, page_tokens)
    page = block_table[sequence, positions // page_tokens].astype(np.int64)
    rows = np.arange(len(token_ids))
    first = np.cumsum([0, *counts[:-1]])
    wanted = [
        rows[begin : begin + n][span.logits]
        for span, begin, n in zip(spans, first, counts, strict=True)
    ]
    return ForwardBatch(
        phase=phase,
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions.astype(np.int32)),
        sequence=torch.from_numpy(sequence.astype(np.int32)),
        kv_slots=torch.from_numpy(page * page_tokens + positions % page_tokens),
        block_table=torch.from_numpy(block_table),
        logit_rows=torch.from_numpy(np.concatenate(wanted)),
    )


def _block_table(spans: Sequence[Span], page_tokens: int) -> npt.NDArray[np.int32]:
    """int32 [S, P], P the pages that the longest sequence uses by now; the rest is 0."""
    used = [pages_for(span.start + len(span.token_ids), page_tokens) for span in spans]
    table = np.zeros((len(spans), max(used)), dtype=np.int32)
    for row, (span, count) in enumerate(zip(spans, used, strict=True)):
        table[row, :count] = span.pages[:count]
    return table
