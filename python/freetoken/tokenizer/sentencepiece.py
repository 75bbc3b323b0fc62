"""SentencePiece's BPE kind: merges chosen by the score of the piece that they make.

`tokenizers` ranks pairs instead, which differs where two pairs make the same piece ("aa"+"a" and
"a"+"aa" in a run of a's), so the merge is done here. Text is cut at word starts, where that cannot
change the result, and words are remembered: prompts repeat theirs.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from freetoken.errors import RequestError

SPACE = "\u2581"
_CACHED_WORDS = 1 << 15
_CACHED_WORD_CHARACTERS = 64

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Where a space is put before text: nowhere, only at the start of the whole text, or at the start of
# every run of text (a run begins at the start and after a special token that `restarts_text`).
Prefix = Literal["never", "first", "each"]


@dataclass(frozen=True)
class SpecialText:
    """A token that is found as it stands in the text, before any merging."""

    token_id: int
    restarts_text: bool


@dataclass(frozen=True)
class Pieces:
    """The mergeable part of a vocabulary.

    `ids` and `scores` are keyed by the piece's text, spaces written as U+2581. `byte_ids` has 256
    ids, or is empty for a vocabulary without byte fallback; `unk_id` then stands for each run of
    unknown characters.
    """

    ids: Mapping[str, int]
    scores: Mapping[str, float]
    byte_ids: Sequence[int]
    unk_id: int | None


@dataclass(frozen=True)
class ScoreMergeEncoder:
    """An `Encoder` that gives what SentencePiece gives for a BPE model.

    `normalize` sees each run of text before spaces are escaped.
    """

    pieces: Pieces
    specials: Mapping[str, SpecialText]
    prefix: Prefix
    normalize: Callable[[str], str] = str
    _special_pattern: re.Pattern[str] | None = field(init=False)
    _word_pattern: re.Pattern[str] = field(init=False)
    _encode_word: Callable[[str], tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        longest_first = sorted(self.specials, key=len, reverse=True)
        specials = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        object.__setattr__(self, "_special_pattern", specials)
        object.__setattr__(self, "_word_pattern", _word_pattern(self.pieces.ids))
        object.__setattr__(
            self, "_encode_word", lru_cache(maxsize=_CACHED_WORDS)(self._merge_to_ids)
        )

    def encode(self, text: str) -> list[int]:
        """Raises RequestError for a character that the vocabulary cannot express."""
        ids: list[int] = []
        start = 0
        wants_prefix = self.prefix != "never"
        matches = self._special_pattern.finditer(text) if self._special_pattern else ()
        for match in matches:
            special = self.specials[match.group()]
            if match.start() > start:
                ids += self._encode_run(text[start : match.start()], wants_prefix)
            ids.append(special.token_id)
            wants_prefix = self.prefix == "each" and special.restarts_text
            start = match.end()
        if start < len(text):
            ids += self._encode_run(text[start:], wants_prefix)
        return ids

    def _encode_run(self, text: str, wants_prefix: bool) -> list[int]:
        text = self.normalize(text)
        if not text:
            return []
        escaped = ((" " if wants_prefix else "") + text).replace(" ", SPACE)
        ids: list[int] = []
        for word in self._word_pattern.findall(escaped):
            short = len(word) <= _CACHED_WORD_CHARACTERS
            ids += self._encode_word(word) if short else self._merge_to_ids(word)
        return ids if self.pieces.byte_ids else _fuse_unknown(ids, self.pieces.unk_id)

    def _merge_to_ids(self, word: str) -> tuple[int, ...]:
        ids: list[int] = []
        for symbol in merge_by_score(word, self.pieces.scores):
            token_id = self.pieces.ids.get(symbol)
            if token_id is not None:
                ids.append(token_id)
            elif self.pieces.byte_ids:
                ids += [self.pieces.byte_ids[byte] for byte in symbol.encode("utf-8")]
            elif self.pieces.unk_id is not None:
                ids.append(self.pieces.unk_id)
            else:
                raise RequestError(
                    f"the vocabulary has no token for {symbol!r}, no bytes and no unknown token: "
                    "expected text in the characters that the model knows"
                )
        return tuple(ids)


def byte_of_token(token: str) -> int | None:
    """The byte that a byte token such as "<0x0A>" stands for; None for another token."""
    match = _BYTE_TOKEN.fullmatch(token)
    return None if match is None else int(match[1], 16)


def merge_by_score(word: str, scores: Mapping[str, float]) -> list[str]:
    """Merge neighbours, always the pair that makes the highest-scored piece (ties: leftmost).

    `word` starts as single characters; the result's pieces joined are `word`.
    """
    symbols = list(word)
    before = list(range(-1, len(symbols) - 1))
    after = [*range(1, len(symbols)), -1] if symbols else []
    heap: list[tuple[float, int, int, int]] = []

    def offer(left: int, right: int) -> None:
        if left < 0 or right < 0:
            return
        score = scores.get(symbols[left] + symbols[right])
        if score is not None:
            length = len(symbols[left]) + len(symbols[right])
            heapq.heappush(heap, (-score, left, right, length))

    for left, right in pairwise(range(len(symbols))):
        offer(left, right)
    while heap:
        _, left, right, length = heapq.heappop(heap)
        stale = not symbols[left] or not symbols[right]
        if stale or len(symbols[left]) + len(symbols[right]) != length:
            continue
        symbols[left] += symbols[right]
        symbols[right] = ""
        after[left] = after[right]
        if after[left] >= 0:
            before[after[left]] = left
        offer(before[left], left)
        offer(left, after[left])
    return [symbol for symbol in symbols if symbol]


def _word_pattern(pieces: Mapping[str, int]) -> re.Pattern[str]:
    """Words that merges cannot cross: cut before spaces, unless some piece has one inside."""
    inner_space = re.compile(f"[^{SPACE}]{SPACE}")
    if any(inner_space.search(piece) for piece in pieces):
        return re.compile(".+", re.DOTALL)
    return re.compile(f"{SPACE}+[^{SPACE}]*|[^{SPACE}]+")


def _fuse_unknown(ids: list[int], unk_id: int | None) -> list[int]:
    """One unknown token for each run of them, as SentencePiece writes it."""
    return [
        token_id
        for index, token_id in enumerate(ids)
        if token_id != unk_id or index == 0 or ids[index - 1] != unk_id
    ]
