"""Encoding through the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tokenizers

from freetoken.errors import FreeTokenError, RequestError


@dataclass(frozen=True)
class FastEncoder:
    """An `Encoder` over a `tokenizers.Tokenizer` whose truncation and padding are off."""

    tokenizer: tokenizers.Tokenizer

    def encode(self, text: str) -> list[int]:
        with panics_explained(_refused):
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


@contextmanager
def panics_explained(explained: Callable[[BaseException], FreeTokenError]) -> Iterator[None]:
    """The library is Rust, where some descriptions of tokenizers end in a panic. Python sees it as
    a BaseException, which nobody expects to be an error."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise explained(error) from error


def _refused(error: BaseException) -> RequestError:
    return RequestError(
        f"the checkpoint's tokenizer fails on this text: {error}; expected token ids; change the "
        "text, or download tokenizer.json again"
    )
