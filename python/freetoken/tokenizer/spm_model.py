"""Reading SentencePiece's `tokenizer.model`: the few protobuf fields that matter here."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from freetoken.errors import CheckpointError


class TokenType(IntEnum):
    """Kinds of token. SentencePiece and GGUF number them alike."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelKind(IntEnum):
    """SentencePiece's algorithms."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass
class SentencePieceModel:
    """What a `tokenizer.model` says. Defaults are those of SentencePiece's schema."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[TokenType] = field(default_factory=list)
    kind: ModelKind = ModelKind.UNIGRAM
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    treat_whitespace_as_suffix: bool = False


_Field = tuple[int, int | bytes]


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Parse the file. Raises CheckpointError if it is no SentencePiece model."""
    try:
        model = _parse_model(path.read_bytes())
    except (ValueError, IndexError, struct.error, TypeError) as error:
        raise CheckpointError(
            f"cannot be read as a SentencePiece model: {error}",
            file=path,
            expected="a complete SentencePiece ModelProto",
            hint="download the file again (a Git LFS pointer of about 130 bytes is not the model)",
        ) from error
    if not model.pieces:
        raise CheckpointError(
            "has no vocabulary",
            file=path,
            found="0 pieces",
            expected="a complete SentencePiece ModelProto",
            hint="download the file again",
        )
    return model


def _parse_model(data: bytes) -> SentencePieceModel:
    model = SentencePieceModel()
    for number, value in _fields(data):
        if number == 1:
            _parse_piece(_message(value), model)
        elif number == 2:
            _parse_trainer(_message(value), model)
        elif number == 3:
            _parse_normalizer(_message(value), model)
    return model


def _parse_piece(data: bytes, model: SentencePieceModel) -> None:
    text, score, kind = "", 0.0, TokenType.NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = _message(value).decode("utf-8")
        elif number == 2:
            (score,) = struct.unpack("<f", _message(value))
        elif number == 3:
            kind = TokenType(_integer(value))
    model.pieces.append(text)
    model.scores.append(score)
    model.types.append(kind)


def _parse_trainer(data: bytes, model: SentencePieceModel) -> None:
    for number, value in _fields(data):
        if number == 3:
            model.kind = ModelKind(_integer(value))
        elif number == 24:
            model.treat_whitespace_as_suffix = bool(_integer(value))
        elif number == 40:
            model.unk_id = _int32(value)
        elif number == 41:
            model.bos_id = _int32(value)
        elif number == 42:
            model.eos_id = _int32(value)


def _parse_normalizer(data: bytes, model: SentencePieceModel) -> None:
    for number, value in _fields(data):
        if number == 2:
            model.charsmap = _message(value)
        elif number == 3:
            model.add_dummy_prefix = bool(_integer(value))
        elif number == 4:
            model.remove_extra_whitespaces = bool(_integer(value))
        elif number == 5:
            model.escape_whitespaces = bool(_integer(value))


def _fields(data: bytes) -> Iterator[_Field]:
    """(field number, value) pairs of a protobuf message: an int for varints, else bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            integer, position = _varint(data, position)
            yield number, integer
            continue
        if wire_type == 2:
            size, position = _varint(data, position)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type} at byte {position}")
        if position + size > len(data):
            raise ValueError(f"a field of {size} bytes at byte {position} of {len(data)}")
        yield number, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"a varint of more than 10 bytes before byte {position}")


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise TypeError("a number where a message was expected")
    return value


def _integer(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise TypeError("a message where a number was expected")
    return value


def _int32(value: int | bytes) -> int:
    """A signed field: negative numbers (-1 means "none") are written as 64-bit varints."""
    number = _integer(value)
    return number - (1 << 64) if number >= 1 << 63 else number
