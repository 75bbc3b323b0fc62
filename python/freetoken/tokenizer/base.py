"""The contract of a tokenizer: text to token ids, token ids to text, chats to prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from freetoken.tokenizer.stream import IncrementalDecoder

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """What the engine and the command line know of a tokenizer. Stateless, safe between threads."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id. A model may have more (padded) rows than this."""
        ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a generation: end of sequence, of turn, of message."""
        ...

    @property
    def has_text(self) -> bool:
        """False for a checkpoint without a tokenizer: only token ids go in, no text comes out."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in the text become their ids.

        `add_special` adds what the model expects around a text (a BOS, rarely an EOS); use False
        for the result of `apply_chat`, whose template has written them. Raises RequestError for
        text that is not valid Unicode, or if the checkpoint has no tokenizer.
        """
        ...

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False
    ) -> str:
        """Text of `ids`: exactly the pieces that `stream` gives, joined.

        Bytes that are no UTF-8 become U+FFFD; ids above the vocabulary (padding rows of a model)
        become nothing. SentencePiece vocabularies put a space before the first word, which is
        dropped here unless `continuation` says that other text stands before these tokens.
        Raises RequestError for negative ids, or if the checkpoint has no tokenizer.
        """
        ...

    def stream(
        self, *, skip_special: bool = True, continuation: bool = False
    ) -> IncrementalDecoder:
        """A decoder for tokens that arrive one at a time; arguments as for `decode`.

        Without a tokenizer it yields empty text, so that token-id prompts can be generated from.
        """
        ...

    def apply_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation, special tokens written out; encode it with
        `add_special=False`.

        A message is a mapping with "role" and usually "content". `variables` go to the template
        as they are (`tools`, `enable_thinking`...). Raises RequestError if there is no template
        or the template refuses or fails.
        """
        ...
