"""What the tokens of a `tokenizers.Tokenizer` stand for, from its decoder's description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from freetoken.errors import CheckpointError
from freetoken.tokenizer.bytelevel import token_bytes
from freetoken.tokenizer.sentencepiece import SPACE, byte_of_token
from freetoken.tokenizer.stream import Vocabulary, pieces_by_id


@dataclass(frozen=True)
class _Rules:
    """How a token's text becomes bytes: GPT-2's alphabet, or replacements and byte tokens."""

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_tokens: bool = False
    strips_first_space: bool = False

    def piece(self, token: str) -> bytes:
        if self.byte_level:
            return token_bytes(token)
        if self.byte_tokens and (byte := byte_of_token(token)) is not None:
            return bytes((byte,))
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode("utf-8")


def vocabulary_of(tokenizer: tokenizers.Tokenizer, path: Path) -> Vocabulary:
    """The bytes of every token. Raises CheckpointError for a decoder that is not known here: a
    guess would give wrong text."""
    rules = _rules(tokenizer, path)
    added = tokenizer.get_added_tokens_decoder()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    pieces = {}
    for token, token_id in vocab.items():
        literal = rules.byte_level and token_id in added
        pieces[token_id] = token.encode("utf-8") if literal else rules.piece(token)
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    return Vocabulary(pieces_by_id(pieces, path), special, rules.strips_first_space)


def _rules(tokenizer: tokenizers.Tokenizer, path: Path) -> _Rules:
    described = tokenizer.decoder
    steps = _flatten({} if described is None else json.loads(described.__getstate__()))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _Rules(byte_level=True)
    if kinds == ["Metaspace"]:
        prefixed = steps[0].get("prepend_scheme", "always") != "never"
        space = ((steps[0].get("replacement", SPACE), " "),)
        return _Rules(replacements=space, strips_first_space=prefixed)
    known = {"Replace", "ByteFallback", "Fuse", "Strip"}
    replaces = [step for step in steps if step.get("type") == "Replace"]
    strips = [step for step in steps if step.get("type") == "Strip"]
    literal = all("String" in step["pattern"] for step in replaces)
    one_space = all((s["content"], s["start"], s["stop"]) == (" ", 1, 0) for s in strips)
    if not kinds or not known.issuperset(kinds) or not literal or not one_space:
        raise CheckpointError(
            "decodes tokens in a way that is not known",
            file=path,
            found=json.dumps(steps)[:200],
            expected="a decoder of kind ByteLevel, Metaspace, or Replace/ByteFallback/Fuse/Strip",
            hint="use a checkpoint of a supported family",
        )
    return _Rules(
        replacements=tuple((step["pattern"]["String"], step["content"]) for step in replaces),
        byte_tokens="ByteFallback" in kinds,
        strips_first_space=bool(strips),
    )


def _flatten(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The steps of a decoder, a Sequence's one by one."""
    if decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder] if decoder else []
