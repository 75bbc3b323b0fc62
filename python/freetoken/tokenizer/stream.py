"""Token ids to text, one id at a time."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from freetoken.errors import CheckpointError, RequestError

# Ten times the largest vocabulary that we know; pieces are kept by id, gaps included.
MAX_TOKENS = 1 << 22


def check_ids(ids: Collection[int], file: Path) -> None:
    """Raises CheckpointError, which names `file`, for ids that no vocabulary has. To be asked
    before a table is made, which is as long as the highest id."""
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < MAX_TOKENS:
            raise CheckpointError(
                "a token has an impossible id",
                file=file,
                found=f"the id {token_id}; {len(ids)} tokens have ids",
                expected=f"ids from 0 to {MAX_TOKENS - 1}",
                hint="the file is damaged: download it again",
            )


def pieces_by_id(pieces: Mapping[int, bytes], file: Path) -> list[bytes]:
    """The pieces of a `Vocabulary`. Raises CheckpointError as `check_ids` does."""
    check_ids(pieces.keys(), file)
    table = [b""] * (max(pieces, default=-1) + 1)
    for token_id, piece in pieces.items():
        table[token_id] = piece
    return table


@dataclass(frozen=True)
class Vocabulary:
    """The bytes that each token stands for.

    `pieces[id]` are raw bytes, which need not be whole UTF-8 characters; b"" for ids that no token
    has. `special` are the ids left out when special tokens are skipped. `strips_first_space` tells
    that encoding put a space before the first word, to be taken away again.
    """

    pieces: Sequence[bytes]
    special: frozenset[int]
    strips_first_space: bool

    def piece(self, token_id: int) -> bytes:
        """Bytes of one token; b"" above the vocabulary. Raises RequestError for a negative id."""
        if token_id < 0:
            raise RequestError(
                f"token id {token_id} is negative: expected 0 to {len(self.pieces) - 1}"
            )
        return self.pieces[token_id] if token_id < len(self.pieces) else b""


class IncrementalDecoder:
    """Text of a growing sequence of tokens. Owned by one request; constant time per token.

    `push` returns the characters that the new token completes, never a part of one: bytes of an
    unfinished character wait for the next token, or for `flush`, which turns them into U+FFFD.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool, continuation: bool) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special if skip_special else frozenset()
        self._strip_space = vocabulary.strips_first_space and not continuation
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` adds. Raises RequestError for a negative id."""
        piece = self._vocabulary.piece(token_id)
        if token_id in self._skipped or not piece:
            return ""
        if self._strip_space:
            piece = piece.removeprefix(b" ")
            self._strip_space = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The end of the sequence: text of an unfinished character, usually empty."""
        return self._utf8.decode(b"", final=True)
