"""Encoding through the `tokenizers` library."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True)
class FastEncoder:
    """An `Encoder` over a `tokenizers.Tokenizer` whose truncation and padding are off."""

    tokenizer: tokenizers.Tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids
