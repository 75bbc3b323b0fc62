"""Directories whose only tokenizer is a SentencePiece `tokenizer.model`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers.normalizers import Precompiled

from freetoken.errors import CheckpointError
from freetoken.tokenizer.chat import ChatTemplate
from freetoken.tokenizer.sentencepiece import (
    SPACE,
    Pieces,
    ScoreMergeEncoder,
    SpecialText,
    byte_of_token,
)
from freetoken.tokenizer.spm_model import (
    ModelKind,
    SentencePieceModel,
    TokenType,
    read_sentencepiece_model,
)
from freetoken.tokenizer.stream import Vocabulary, pieces_by_id
from freetoken.tokenizer.text import SpecialIds, TextTokenizer

_MERGED = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)


def load_spm_tokenizer(
    path: Path,
    *,
    added: Mapping[int, AddedToken],
    config: Mapping[str, Any],
    end_ids: frozenset[int],
    chat: ChatTemplate | None,
) -> TextTokenizer:
    """A tokenizer from `path`, with the tokens and flags of tokenizer_config.json.

    Raises CheckpointError for what the merging here does not cover.
    """
    model = read_sentencepiece_model(path)
    _check_supported(model, path)
    texts = dict(enumerate(model.pieces))
    texts.update({token_id: token.content for token_id, token in added.items()})
    legacy = bool(config.get("legacy", True))
    encoder = ScoreMergeEncoder(
        pieces=_pieces(model),
        specials=_specials(model, added),
        prefix=("each" if legacy else "first") if model.add_dummy_prefix else "never",
        normalize=_normalizer(model),
    )
    bos = model.bos_id if model.bos_id >= 0 else None
    eos = model.eos_id if model.eos_id >= 0 else None
    adds_bos = bool(config.get("add_bos_token", True)) and bos is not None
    adds_eos = bool(config.get("add_eos_token", False)) and eos is not None
    return TextTokenizer(
        encoder=encoder,
        vocabulary=_vocabulary(model, texts, added, path.parent / "tokenizer_config.json"),
        special=SpecialIds(
            bos_id=bos,
            eos_ids=end_ids | (frozenset() if eos is None else {eos}),
            prefix=(bos,) if adds_bos and bos is not None else (),
            suffix=(eos,) if adds_eos and eos is not None else (),
        ),
        chat=chat,
    )


def _check_supported(model: SentencePieceModel, path: Path) -> None:
    usual = model.escape_whitespaces and not model.treat_whitespace_as_suffix
    if model.kind is ModelKind.BPE and usual:
        return
    raise CheckpointError(
        "is a kind of SentencePiece model that is not read directly",
        file=path,
        found=f"{model.kind.name}, spaces {'usual' if usual else 'unescaped or at word ends'}",
        expected="BPE with the usual treatment of spaces, or a tokenizer.json beside it",
        hint="load the directory with transformers' AutoTokenizer and call save_pretrained on it, "
        "which writes tokenizer.json",
    )


def _pieces(model: SentencePieceModel) -> Pieces:
    merged = [i for i, kind in enumerate(model.types) if kind in _MERGED]
    id_of_byte = {byte: token_id for token_id, byte in _byte_tokens(model).items()}
    return Pieces(
        ids={model.pieces[i]: i for i in merged},
        scores={model.pieces[i]: model.scores[i] for i in merged},
        byte_ids=[id_of_byte[byte] for byte in range(256)] if len(id_of_byte) == 256 else (),
        unk_id=model.unk_id if model.unk_id >= 0 else None,
    )


def _specials(model: SentencePieceModel, added: Mapping[int, AddedToken]) -> dict[str, SpecialText]:
    """Control tokens restart the text; user-defined pieces stand inside it."""
    specials = {
        _unescaped(piece): SpecialText(token_id, restarts_text=kind is not TokenType.USER_DEFINED)
        for token_id, (piece, kind) in enumerate(zip(model.pieces, model.types, strict=True))
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    }
    specials.update(
        {token.content: SpecialText(token_id, True) for token_id, token in added.items()}
    )
    return specials


def _vocabulary(
    model: SentencePieceModel,
    texts: Mapping[int, str],
    added: Mapping[int, AddedToken],
    file: Path,
) -> Vocabulary:
    pieces = {token_id: _unescaped(text).encode("utf-8") for token_id, text in texts.items()}
    pieces.update({token_id: bytes((byte,)) for token_id, byte in _byte_tokens(model).items()})
    hidden = {
        token_id
        for token_id, kind in enumerate(model.types)
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN)
    }
    hidden |= {token_id for token_id, token in added.items() if token.special}
    return Vocabulary(pieces_by_id(pieces, file), frozenset(hidden), model.add_dummy_prefix)


def _byte_tokens(model: SentencePieceModel) -> dict[int, int]:
    """Token id -> the byte that it stands for."""
    found = {
        token_id: byte_of_token(piece)
        for token_id, (piece, kind) in enumerate(zip(model.pieces, model.types, strict=True))
        if kind is TokenType.BYTE
    }
    return {token_id: byte for token_id, byte in found.items() if byte is not None}


def _normalizer(model: SentencePieceModel) -> Callable[[str], str]:
    """What SentencePiece does to text before spaces are escaped."""
    charsmap = Precompiled(model.charsmap) if model.charsmap else None
    spaces = re.compile(" {2,}") if model.remove_extra_whitespaces else None

    def normalize(text: str) -> str:
        if charsmap is not None:
            text = charsmap.normalize_str(text)
        return text if spaces is None else spaces.sub(" ", text).strip(" ")

    return normalize


def _unescaped(piece: str) -> str:
    return piece.replace(SPACE, " ")
