"""Flattening a plan."""

from __future__ import annotations

import torch

from freetoken.engine.forward_batch import EVERY_TOKEN, LAST_TOKEN, NO_TOKEN, Span, build_batch
from freetoken.models.batch import Phase


def test_several_sequences() -> None:
    spans = [
        Span([10, 11, 12], start=3, pages=[5, 2, 9], logits=LAST_TOKEN),
        Span([20], start=0, pages=[7], logits=NO_TOKEN),
        Span([30, 31], start=7, pages=[1, 3, 4, 8], logits=EVERY_TOKEN),
    ]
    batch = build_batch(Phase.PREFILL, spans, page_tokens=4)
    assert batch.phase is Phase.PREFILL
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 30, 31]
    assert batch.positions.tolist() == [3, 4, 5, 0, 7, 8]
    assert batch.sequence.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.kv_slots.tolist() == [23, 8, 9, 28, 15, 16]
    assert batch.block_table.tolist() == [[5, 2, 0], [7, 0, 0], [1, 3, 4]]
    assert batch.logit_rows.tolist() == [2, 4, 5]


def test_dtypes() -> None:
    batch = build_batch(Phase.DECODE, [Span([1], 0, [1], NO_TOKEN)], page_tokens=4)
    assert batch.token_ids.dtype == batch.kv_slots.dtype == batch.logit_rows.dtype == torch.int64
    assert batch.positions.dtype == batch.sequence.dtype == batch.block_table.dtype == torch.int32
    assert batch.logit_rows.shape == (0,)
