"""The tokenizer of a checkpoint that carries none: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from freetoken.errors import RequestError
from freetoken.tokenizer.base import Message
from freetoken.tokenizer.stream import IncrementalDecoder, Vocabulary

_NO_PIECES = Vocabulary(pieces=(), special=frozenset(), strips_first_space=False)


@dataclass(frozen=True)
class AbsentTokenizer:
    """A `Tokenizer` that knows ids but no text.

    Everything that needs text raises RequestError; `stream` yields nothing, so that a prompt of
    token ids can still be completed into token ids.
    """

    path: Path
    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]

    @property
    def has_text(self) -> bool:
        return False

    @property
    def has_chat_template(self) -> bool:
        return False

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        self._refuse()

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False
    ) -> str:
        self._refuse()

    def stream(
        self, *, skip_special: bool = True, continuation: bool = False
    ) -> IncrementalDecoder:
        return IncrementalDecoder(_NO_PIECES, skip_special=skip_special, continuation=continuation)

    def apply_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RequestError(
            f"{self.path} has no tokenizer, so text can be neither read nor written: expected a "
            f"prompt of token ids (0 to {self.vocab_size - 1}), or a checkpoint with its tokenizer "
            "files"
        )
