"""A tokenizer made of its parts: an encoder, a vocabulary, special ids and a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from freetoken.errors import RequestError, shown
from freetoken.tokenizer.base import Message
from freetoken.tokenizer.chat import ChatTemplate
from freetoken.tokenizer.ids import bytes_hint, read_ids
from freetoken.tokenizer.stream import IncrementalDecoder, Vocabulary

_TO_DECODE = "the tokens to decode are a list of token ids (whole numbers)"


class Encoder(Protocol):
    """Text to token ids, special tokens in the text included, nothing added around it."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class SpecialIds:
    """Ids with a role. `prefix` and `suffix` are what encoding adds around a text."""

    bos_id: int | None
    eos_ids: frozenset[int]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


@dataclass(frozen=True)
class TextTokenizer:
    """The `Tokenizer` of every checkpoint that carries one."""

    encoder: Encoder
    vocabulary: Vocabulary
    special: SpecialIds
    chat: ChatTemplate | None

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.pieces)

    @property
    def bos_id(self) -> int | None:
        return self.special.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.special.eos_ids

    @property
    def has_text(self) -> bool:
        return True

    @property
    def has_chat_template(self) -> bool:
        return self.chat is not None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        _check_text(text)
        ids = self.encoder.encode(text)
        return [*self.special.prefix, *ids, *self.special.suffix] if add_special else ids

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False
    ) -> str:
        decoder = self.stream(skip_special=skip_special, continuation=continuation)
        return "".join(map(decoder.push, read_ids(ids, _TO_DECODE))) + decoder.flush()

    def stream(
        self, *, skip_special: bool = True, continuation: bool = False
    ) -> IncrementalDecoder:
        return IncrementalDecoder(
            self.vocabulary, skip_special=skip_special, continuation=continuation
        )

    def apply_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        if self.chat is None:
            raise RequestError(
                "this checkpoint has no chat template: expected chat_template in "
                "tokenizer_config.json, or tokenizer.chat_template in a GGUF file; send a plain "
                "prompt, or use an instruction-tuned checkpoint"
            )
        return self.chat.render(messages, add_generation_prompt, variables or {})


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"the text to encode is {shown(text)}; expected a str{bytes_hint(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has the lone surrogate {text[error.start]!a} at position {error.start}: "
            "expected valid Unicode; decode its source as UTF-8 with errors='replace'"
        ) from error
