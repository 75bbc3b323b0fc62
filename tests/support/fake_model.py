"""A model and a tokenizer for tests of the engine, without weights.

The model's logits are a function of the tokens that it reads back out of the paged cache, so that
a wrong page, slot, position or chunk changes what is generated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from freetoken.kvcache import KVCache
from freetoken.models.batch import ForwardBatch, Phase

VOCAB = 40
EOS = 39


class FakeModel:
    """After a sequence of tokens the largest logit is `next_token(tokens)`.

    `batches` records (phase, tokens in the step, sequences in the step).
    """

    def __init__(self, next_token: Callable[[list[int]], int]) -> None:
        self.next_token = next_token
        self.batches: list[tuple[Phase, int, int]] = []
        self.before_forward: Callable[[int], None] = lambda step: None
        self.poison = False

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        self.before_forward(len(self.batches))
        self.batches.append((batch.phase, len(batch.token_ids), len(batch.block_table)))
        cache = kv.keys[0].view(-1)
        cache[batch.kv_slots] = batch.token_ids.float()
        logits = torch.zeros(len(batch.logit_rows), VOCAB)
        for out, token in enumerate(batch.logit_rows.tolist()):
            sequence = self._read_back(batch, cache, kv.page_tokens, token)
            generator = torch.Generator().manual_seed(hash(tuple(sequence)) % 2**31)
            logits[out] = torch.randn(VOCAB, generator=generator)
            logits[out, self.next_token(sequence)] = 9.0
        return logits * torch.nan if self.poison else logits

    @staticmethod
    def _read_back(batch: ForwardBatch, cache: Tensor, page_tokens: int, token: int) -> list[int]:
        pages = batch.block_table[batch.sequence[token]].long()
        positions = torch.arange(int(batch.positions[token]) + 1)
        slots = pages[positions // page_tokens] * page_tokens + positions % page_tokens
        return [int(value) for value in cache[slots].tolist()]


def count_up(tokens: list[int]) -> int:
    """The next token is one more than the last."""
    return (tokens[-1] + 1) % VOCAB


def mixed(tokens: list[int]) -> int:
    """The next token depends on every token and its place; the end token comes now and then."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1009
    return state % VOCAB


def new_cache(pages: int = 64, page_tokens: int = 4) -> KVCache:
    return KVCache(layers=1, pages=pages, page_tokens=page_tokens, kv_heads=1, head_dim=1)


class LetterDecoder:
    """Token i is the letter of that number; what is held back comes out with the flush."""

    def push(self, token_id: int) -> str:
        return letter(token_id)

    def flush(self) -> str:
        return ""


class LetterTokenizer:
    eos_ids = frozenset({EOS})

    def stream(self, *, skip_special: bool = True, continuation: bool = False) -> LetterDecoder:
        return LetterDecoder()


def letter(token_id: int) -> str:
    return chr(ord("A") + token_id)
