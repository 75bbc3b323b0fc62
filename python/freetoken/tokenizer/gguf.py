"""Tokenizers from the metadata of GGUF files.

The ids are those of llama.cpp, except where it departs from the model's own tokenizer: text for
Qwen vocabularies is composed first (NFC), and capitals are told apart by the original pattern.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers.models import BPE

from freetoken.checkpoints.base import Checkpoint
from freetoken.errors import CheckpointError
from freetoken.tokenizer.absent import AbsentTokenizer
from freetoken.tokenizer.base import Tokenizer
from freetoken.tokenizer.bytelevel import token_bytes
from freetoken.tokenizer.chat import ChatTemplate
from freetoken.tokenizer.fast import FastEncoder
from freetoken.tokenizer.pretokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from freetoken.tokenizer.sentencepiece import (
    SPACE,
    Pieces,
    ScoreMergeEncoder,
    SpecialText,
    byte_of_token,
)
from freetoken.tokenizer.spm_model import TokenType
from freetoken.tokenizer.stream import Vocabulary
from freetoken.tokenizer.text import SpecialIds, TextTokenizer

_log = logging.getLogger(__name__)

_FOUND_IN_TEXT = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
_HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Files of before `eot_token_id` mark the end of a turn only by such a control token.
_END_OF_TURN = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<EOT>", "<|end_of_text|>")
)


@dataclass(frozen=True)
class _Table:
    """The vocabulary as the file has it, and typed access to the other keys."""

    path: Path
    metadata: Mapping[str, Any]
    tokens: Sequence[str]
    types: Sequence[TokenType]

    def flag(self, key: str, default: bool) -> bool:
        value = _scalar(self.path, self.metadata, f"tokenizer.ggml.{key}", bool)
        return default if value is None else value

    def token_id(self, key: str) -> int | None:
        """The id under `key`, None if the file has none. Raises CheckpointError outside the
        vocabulary."""
        value = _scalar(self.path, self.metadata, f"tokenizer.ggml.{key}", int)
        if value is not None and not 0 <= value < len(self.tokens):
            raise CheckpointError(
                f"tokenizer.ggml.{key} is outside the vocabulary",
                file=self.path,
                found=value,
                expected=f"0 to {len(self.tokens) - 1}",
                hint="the file is damaged or was converted wrongly; convert it again",
            )
        return value

    def named_tokens(self) -> dict[str, str]:
        """What a chat template sees: {"bos_token": "<s>", ...}."""
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {name: self.token_id(f"{key}_token_id") for name, key in keys.items()}
        return {
            f"{name}_token": self.tokens[token_id]
            for name, token_id in ids.items()
            if token_id is not None
        }


def load_gguf_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that the metadata describe; ids only for `none` or no tokenizer at all.

    Raises CheckpointError for kinds of tokenizer and pre-tokenizers that are not known, and for
    tables that contradict each other.
    """
    kind = _scalar(checkpoint.path, checkpoint.metadata, "tokenizer.ggml.model", str)
    if kind is None or kind == "none":
        return _absent(checkpoint)
    return tokenizer_of_metadata(checkpoint.path, checkpoint.metadata)


def tokenizer_of_metadata(path: Path, metadata: Mapping[str, Any]) -> TextTokenizer:
    """The tokenizer that GGUF keys describe; errors name `path`. For a vocabulary that is not in a
    file yet, too. Raises CheckpointError as `load_gguf_tokenizer` does."""
    kind = _scalar(path, metadata, "tokenizer.ggml.model", str)
    if kind == "gpt2":
        return _byte_level(_read_table(path, metadata))
    if kind == "llama":
        return _score_merge(_read_table(path, metadata))
    raise CheckpointError(
        "tokenizer.ggml.model names a kind of tokenizer that is not known",
        file=path,
        found=repr(kind),
        expected="gpt2 (byte-level BPE), llama (SentencePiece BPE) or none",
        hint="use a checkpoint of a supported family, or its Hugging Face directory",
    )


_Scalar = TypeVar("_Scalar", bool, int, str)
_Number = TypeVar("_Number", int, float)


def _scalar(
    path: Path, metadata: Mapping[str, Any], key: str, kind: type[_Scalar]
) -> _Scalar | None:
    """The value under `key`, None if there is none. Raises CheckpointError for another type."""
    value = metadata.get(key)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) is kind:
        return value
    raise CheckpointError(
        f"{key} has the wrong type",
        file=path,
        found=f"{value!r}"[:80],
        expected=kind.__name__,
        hint="the file is damaged or was converted wrongly; convert it again",
    )


def _numbers(
    path: Path, key: str, values: Sequence[Any], convert: Callable[[Any], _Number]
) -> list[_Number]:
    """An array's items as Python numbers. Raises CheckpointError for other items."""
    try:
        return [convert(value) for value in values]
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"tokenizer.ggml.{key} has an item that is no number: {error}",
            file=path,
            expected="an array of numbers",
            hint="the file is damaged or was converted wrongly; convert it again",
        ) from error


def _read_table(path: Path, metadata: Mapping[str, Any]) -> _Table:
    tokens = [str(token) for token in _array(path, metadata, "tokens")]
    types = [TokenType.NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        values = _array(path, metadata, "token_type", len(tokens))
        known = {int(kind): kind for kind in TokenType}
        numbers = _numbers(path, "token_type", values, int)
        types = [known.get(number, TokenType.NORMAL) for number in numbers]
    return _Table(path, metadata, tokens, types)


def _array(
    path: Path, metadata: Mapping[str, Any], key: str, length: int | None = None
) -> Sequence[Any]:
    """An array of the metadata. Raises CheckpointError if missing or not of that length."""
    name = f"tokenizer.ggml.{key}"
    values = metadata.get(name)
    if values is None or isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
        raise CheckpointError(
            f"{name} is missing or no array",
            file=path,
            found="nothing" if values is None else type(values).__name__,
            expected="an array with one entry per token",
            hint="convert the model to GGUF again, with its tokenizer",
        )
    if length is not None and len(values) != length:
        raise CheckpointError(
            f"{name} has another length than the vocabulary",
            file=path,
            found=f"{len(values)} entries",
            expected=f"{length}, as in tokenizer.ggml.tokens",
            hint="convert the model to GGUF again, with its tokenizer",
        )
    sequence: Sequence[Any] = values
    return sequence


def _absent(checkpoint: Checkpoint) -> AbsentTokenizer:
    path, metadata = checkpoint.path, checkpoint.metadata
    architecture = _scalar(path, metadata, "general.architecture", str)
    size = _scalar(path, metadata, f"{architecture}.vocab_size", int)
    ends = [_scalar(path, metadata, f"tokenizer.ggml.{key}", int) for key in _END_KEYS]
    return AbsentTokenizer(
        path=path,
        vocab_size=checkpoint.tensor("token_embd.weight").shape[0] if size is None else size,
        bos_id=_scalar(path, metadata, "tokenizer.ggml.bos_token_id", int),
        eos_ids=frozenset(end for end in ends if end is not None),
    )


def _byte_level(table: _Table) -> TextTokenizer:
    pre = _pre_tokenizer(table)
    pieces = [
        token_bytes(token) if kind is TokenType.NORMAL else token.encode("utf-8")
        for token, kind in zip(table.tokens, table.types, strict=True)
    ]
    return TextTokenizer(
        encoder=FastEncoder(_bpe(table, pre)),
        vocabulary=Vocabulary(pieces, _hidden(table), strips_first_space=False),
        special=_special_ids(table, bos=table.token_id("bos_token_id"), adds_bos=pre.adds_bos),
        chat=_chat(table),
    )


def _pre_tokenizer(table: _Table) -> PreTokenizer:
    name = _scalar(table.path, table.metadata, "tokenizer.ggml.pre", str)
    if name is None:
        _log.warning(
            "%s does not say how its tokenizer cuts words (tokenizer.ggml.pre): using the default, "
            "which may give worse text; convert the model again to be sure",
            table.path,
        )
        return DEFAULT
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            "tokenizer.ggml.pre names a pre-tokenizer that is not known",
            file=table.path,
            found=repr(name),
            expected=", ".join(PRE_TOKENIZERS),
            hint="use the model's Hugging Face directory, whose tokenizer.json says everything",
        )
    return PRE_TOKENIZERS[name]


def _bpe(table: _Table, pre: PreTokenizer) -> tokenizers.Tokenizer:
    merges = table.metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise CheckpointError(
            "tokenizer.ggml.merges is missing",
            file=table.path,
            expected='an array of pairs such as "h e"',
            hint="convert the model to GGUF again, with its tokenizer",
        )
    ids = {token: token_id for token_id, token in enumerate(table.tokens)}
    try:
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        model = BPE(vocab=ids, merges=pairs, ignore_merges=pre.whole_words_first)
    except Exception as error:  # the library raises plain Exception for merges out of vocabulary
        raise CheckpointError(
            f"tokenizer.ggml.merges does not fit the vocabulary: {error}",
            file=table.path,
            expected='pairs such as "h e" whose parts and whole are in tokenizer.ggml.tokens',
            hint="the file is damaged; download or convert it again",
        ) from error
    tokenizer = tokenizers.Tokenizer(model)
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind is not TokenType.USER_DEFINED)
            for token, kind in zip(table.tokens, table.types, strict=True)
            if kind in _FOUND_IN_TEXT and token
        ]
    )
    return tokenizer


def _score_merge(table: _Table) -> TextTokenizer:
    values = _array(table.path, table.metadata, "scores", len(table.tokens))
    scores = _numbers(table.path, "scores", values, float)
    prefixed = table.flag("add_space_prefix", True)
    byte_of = _byte_tokens(table)
    id_of_byte = {byte: token_id for token_id, byte in byte_of.items()}
    mergeable = [
        token_id
        for token_id, kind in enumerate(table.types)
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
        and token_id not in byte_of
    ]
    unk = _or_default(table, "unknown_token_id", 0)
    encoder = ScoreMergeEncoder(
        pieces=Pieces(
            ids={table.tokens[token_id]: token_id for token_id in mergeable},
            scores={table.tokens[token_id]: scores[token_id] for token_id in mergeable},
            byte_ids=[id_of_byte[byte] for byte in range(256)] if len(id_of_byte) == 256 else (),
            unk_id=unk,
        ),
        specials={
            token: SpecialText(token_id, restarts_text=True)
            for token_id, (token, kind) in enumerate(zip(table.tokens, table.types, strict=True))
            if kind in _FOUND_IN_TEXT and token
        },
        prefix="each" if prefixed else "never",
    )
    pieces = [
        bytes((byte_of[token_id],)) if token_id in byte_of else _spaced(token)
        for token_id, token in enumerate(table.tokens)
    ]
    return TextTokenizer(
        encoder=encoder,
        vocabulary=Vocabulary(pieces, _hidden(table), strips_first_space=prefixed),
        special=_special_ids(table, bos=_or_default(table, "bos_token_id", 1), adds_bos=True),
        chat=_chat(table),
    )


def _byte_tokens(table: _Table) -> dict[int, int]:
    """Token id -> the byte that it stands for. Files without token types are read by spelling."""
    untyped = "tokenizer.ggml.token_type" not in table.metadata
    found = {
        token_id: byte_of_token(token)
        for token_id, (token, kind) in enumerate(zip(table.tokens, table.types, strict=True))
        if untyped or kind is TokenType.BYTE
    }
    return {token_id: byte for token_id, byte in found.items() if byte is not None}


def _spaced(token: str) -> bytes:
    return token.replace(SPACE, " ").encode("utf-8")


def _or_default(table: _Table, key: str, default: int) -> int | None:
    """SentencePiece's usual id where the file is silent."""
    if f"tokenizer.ggml.{key}" in table.metadata:
        return table.token_id(key)
    return default if default < len(table.tokens) else None


def _hidden(table: _Table) -> frozenset[int]:
    return frozenset(i for i, kind in enumerate(table.types) if kind in _HIDDEN)


def _special_ids(table: _Table, bos: int | None, adds_bos: bool) -> SpecialIds:
    ends = [table.token_id(key) for key in _END_KEYS]
    marked = [
        token_id
        for token_id, (token, kind) in enumerate(zip(table.tokens, table.types, strict=True))
        if kind is TokenType.CONTROL and token in _END_OF_TURN
    ]
    eos = ends[0]
    wants_bos = table.flag("add_bos_token", adds_bos)
    wants_eos = table.flag("add_eos_token", False)
    for wanted, found, name in ((wants_bos, bos, "bos"), (wants_eos, eos, "eos")):
        if wanted and found is None:
            raise CheckpointError(
                f"tokenizer.ggml.add_{name}_token is set, but there is no such token",
                file=table.path,
                expected=f"tokenizer.ggml.{name}_token_id",
                hint="convert the model to GGUF again, with its tokenizer",
            )
    return SpecialIds(
        bos_id=bos,
        eos_ids=frozenset([*(end for end in ends if end is not None), *marked]),
        prefix=(bos,) if wants_bos and bos is not None else (),
        suffix=(eos,) if wants_eos and eos is not None else (),
    )


def _chat(table: _Table) -> ChatTemplate | None:
    source = _scalar(table.path, table.metadata, "tokenizer.chat_template", str)
    return None if source is None else ChatTemplate(source, table.named_tokens())
