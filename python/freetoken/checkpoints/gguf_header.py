"""A strict, bounded parser of one GGUF file's header (versions 2 and 3, little endian).

The `gguf` package's reader is not used: it believes every length and count that a file states
(a damaged header makes it allocate, loop or fail with whatever NumPy raises), and it builds several
arrays per string, which takes seconds for a vocabulary. Here each length is checked against the
bytes that are left before anything is read, the number of Python objects is bounded, and nothing
but CheckpointError is raised.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from freetoken.checkpoints.ggml_types import GGML_TYPES, GgmlType
from freetoken.checkpoints.mapping import MappedFile
from freetoken.checkpoints.tables import StoredTensor, check_extents
from freetoken.errors import CheckpointError
from freetoken.formats import FORMATS

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_BIG_ENDIAN_VERSIONS = tuple(int.from_bytes(v.to_bytes(4, "little"), "big") for v in (1, 2, 3))
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS

# Far above any real model (vocabularies have 300,000 entries, headers 30 MB), far below trouble.
_MAX_HEADER_BYTES = 512 << 20
_MAX_OBJECTS = 4 << 20
_MAX_NAME_BYTES = 1 << 10

_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_SMALLEST_PAIR_BYTES = 8 + 4 + 1  # key length, value type, value
_SMALLEST_TENSOR_BYTES = 8 + 4 + 4 + 8  # name length, number of dimensions, type, offset


@dataclass(frozen=True)
class GgufPart:
    """One GGUF file. Numeric arrays of the metadata are NumPy copies, strings Python's."""

    file: MappedFile
    metadata: Mapping[str, Any]
    tensors: tuple[StoredTensor, ...]


def read_gguf_part(file: MappedFile) -> GgufPart:
    """Parse and check the header. Raises CheckpointError."""
    cursor = _Cursor(file)
    _read_version(cursor)
    tensor_count = cursor.count("tensors", _SMALLEST_TENSOR_BYTES, 8)
    pair_count = cursor.count("metadata pairs", _SMALLEST_PAIR_BYTES, 0)
    metadata = _read_metadata(cursor, pair_count)
    alignment = _alignment(cursor, metadata)
    infos = [_read_tensor_info(cursor) for _ in range(tensor_count)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors = tuple(_place(cursor, info, data_start, alignment) for info in infos)
    check_extents(tensors)
    return GgufPart(file, metadata, tensors)


class _Cursor:
    """A position in the header. Every read is checked against the end first."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.position = 0
        self.end = min(file.bytes, _MAX_HEADER_BYTES)
        self.objects = 0

    def error(self, problem: str, found: object, expected: object) -> CheckpointError:
        return CheckpointError(
            problem,
            file=self.file.path,
            found=found,
            expected=expected,
            hint="the file is damaged or incomplete: download or convert it again",
        )

    def take(self, count: int, what: str) -> int:
        """Move over `count` bytes; the position where they begin."""
        start = self.position
        if count > self.end - start:
            raise self.error(
                f"the header ends within {what}",
                found=f"{count} bytes wanted at offset {start}",
                expected=f"at most {self.end - start} bytes, up to offset {self.end}",
            )
        self.position = start + count
        return start

    def scalar(self, layout: struct.Struct, what: str) -> Any:
        return layout.unpack_from(self.file.map, self.take(layout.size, what))[0]

    def string(self, what: str) -> str:
        length: int = self.scalar(_U64, what)
        start = self.take(length, what)
        return self.decode(start, start + length, what)

    def name(self, what: str) -> str:
        """A string that error messages will repeat."""
        start = self.position
        length: int = self.scalar(_U64, what)
        if not 0 < length <= _MAX_NAME_BYTES:
            found, expected = f"{length} bytes", f"1 to {_MAX_NAME_BYTES} bytes"
            raise self.error(f"{what} has an invalid length", found, expected)
        self.position = start
        return self.string(what)

    def decode(self, start: int, end: int, what: str) -> str:
        try:
            return self.file.map[start:end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(
                f"{what} is no valid text", found=f"{error} from offset {start}", expected="UTF-8"
            ) from error

    def count(self, what: str, smallest_bytes: int, reserved_bytes: int) -> int:
        """A number of things that each take at least `smallest_bytes`, of which `reserved_bytes`
        of the rest cannot be part."""
        value: int = self.scalar(_U64, f"the number of {what}")
        self.check_count(value, smallest_bytes, what, reserved_bytes)
        self.claim_objects(value, what)
        return value

    def check_count(self, value: int, smallest_bytes: int, what: str, reserved_bytes: int) -> None:
        fitting = max(0, self.end - self.position - reserved_bytes) // smallest_bytes
        if value > fitting:
            raise self.error(
                f"the number of {what} is impossible",
                found=value,
                expected=f"at most {fitting}, which is what the rest of the header could hold",
            )

    def claim_objects(self, count: int, what: str) -> None:
        self.objects += count
        if self.objects > _MAX_OBJECTS:
            raise self.error(
                f"the header has too many entries, counting {what}",
                found=self.objects,
                expected=f"at most {_MAX_OBJECTS}",
            )


def _read_version(cursor: _Cursor) -> None:
    file = cursor.file
    magic = file.map[: len(MAGIC)]
    if magic != MAGIC:
        raise CheckpointError(
            "not a GGUF file",
            file=file.path,
            found=f"first bytes {magic!r}",
            expected=repr(MAGIC),
            hint="give a GGUF file; older GGML files must be converted with llama.cpp",
        )
    cursor.take(len(MAGIC), "the magic number")
    version: int = cursor.scalar(_U32, "the version")
    if version in _BIG_ENDIAN_VERSIONS:
        raise CheckpointError(
            "a big-endian GGUF file",
            file=file.path,
            found=f"version bytes {version.to_bytes(4, 'little').hex()}",
            expected="a little-endian file",
            hint="convert it with `gguf-convert-endian FILE little`",
        )
    if version not in _VERSIONS:
        raise CheckpointError(
            "unsupported GGUF version",
            file=file.path,
            found=version,
            expected=" or ".join(map(str, _VERSIONS)),
            hint="convert the model again with a current llama.cpp",
        )


def _read_metadata(cursor: _Cursor, pair_count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(pair_count):
        key = cursor.name(f"the key of metadata pair {index}")
        if key in metadata:
            raise cursor.error(f"the metadata key {key!r} occurs twice", key, "every key once")
        value_type: int = cursor.scalar(_U32, f"the type of metadata {key!r}")
        metadata[key] = _read_value(cursor, value_type, f"metadata {key!r}")
    return metadata


def _read_value(cursor: _Cursor, value_type: int, what: str) -> Any:
    if value_type in _SCALARS:
        return cursor.scalar(_SCALARS[value_type], what)
    if value_type == _STRING:
        return cursor.string(what)
    if value_type == _BOOL:
        return bool(_read_bools(cursor, 1, what)[0])
    if value_type == _ARRAY:
        return _read_array(cursor, what)
    raise cursor.error(f"{what} has an unknown type", value_type, "a GGUF value type, 0 to 12")


def _read_array(cursor: _Cursor, what: str) -> Any:
    """A NumPy array of numbers or bools, or a list of strings."""
    item_type: int = cursor.scalar(_U32, f"the item type of {what}")
    count: int = cursor.scalar(_U64, f"the length of {what}")
    if item_type in _SCALARS:
        layout = _SCALARS[item_type]
        cursor.check_count(count, layout.size, f"items of {what}", 0)
        start = cursor.take(count * layout.size, what)
        return np.frombuffer(cursor.file.map, layout.format, count, start).copy()
    if item_type == _BOOL:
        cursor.check_count(count, 1, f"items of {what}", 0)
        return _read_bools(cursor, count, what)
    if item_type == _STRING:
        cursor.check_count(count, _U64.size, f"items of {what}", 0)
        cursor.claim_objects(count, f"items of {what}")
        return _read_strings(cursor, count, what)
    found = "an array of arrays" if item_type == _ARRAY else f"item type {item_type}"
    raise cursor.error(f"{what} has unsupported items", found, "numbers, bools or strings")


def _read_bools(cursor: _Cursor, count: int, what: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    start = cursor.take(count, what)
    raw = cursor.file.data[start : start + count]
    if count and raw.max() > 1:
        raise cursor.error(f"{what} is no bool", f"a byte of value {raw.max()}", "0 or 1")
    return raw.astype(np.bool_)


def _read_strings(cursor: _Cursor, count: int, what: str) -> list[str]:
    """A vocabulary has hundreds of thousands of strings: one plain loop, checks included."""
    buffer, end, position = cursor.file.map, cursor.end, cursor.position
    unpack = _U64.unpack_from
    strings: list[str] = []
    append = strings.append
    try:
        for _ in range(count):
            start = position + 8
            if start > end:
                break
            position = start + unpack(buffer, position)[0]
            if position > end:
                break
            append(buffer[start:position].decode())
    except UnicodeDecodeError:
        cursor.decode(start, position, what)  # raises the error that says where
    if len(strings) != count:
        raise cursor.error(
            f"the header ends within {what}",
            found=f"item {len(strings)} of {count} ends at offset {position}",
            expected=f"an item that ends by offset {end}",
        )
    cursor.position = position
    return strings


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    valid = isinstance(value, int) and not isinstance(value, bool)
    if not valid or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
        raise cursor.error(
            "metadata 'general.alignment' is invalid",
            found=repr(value),
            expected=f"a power of two up to {_MAX_ALIGNMENT}",
        )
    return int(value)


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int  # from the start of the data


def _read_tensor_info(cursor: _Cursor) -> _TensorInfo:
    name = cursor.name("a tensor's name")
    what = f"the description of tensor {name!r}"
    dimensions: int = cursor.scalar(_U32, what)
    if dimensions > _MAX_DIMENSIONS:
        raise cursor.error(
            f"tensor {name!r} has too many dimensions", dimensions, f"at most {_MAX_DIMENSIONS}"
        )
    shape = tuple(cursor.scalar(_U64, what) for _ in range(dimensions))[::-1]
    if 0 in shape:
        raise cursor.error(
            f"tensor {name!r} has an empty dimension", list(shape), "at least 1 each"
        )
    type_id: int = cursor.scalar(_U32, what)
    if type_id not in GGML_TYPES:
        raise CheckpointError(
            "unknown tensor type",
            file=cursor.file.path,
            tensor=name,
            found=f"type number {type_id}",
            expected=f"one of {', '.join(FORMATS)}",
            hint="use a checkpoint in a supported type, or convert this one",
        )
    return _TensorInfo(name, GGML_TYPES[type_id], shape, cursor.scalar(_U64, what))


def _place(cursor: _Cursor, info: _TensorInfo, data_start: int, alignment: int) -> StoredTensor:
    columns = info.shape[-1] if info.shape else 1
    if columns % info.type.block_elements:
        raise CheckpointError(
            f"a row is no whole number of {info.type.name} blocks",
            file=cursor.file.path,
            tensor=info.name,
            found=f"shape {list(info.shape)}",
            expected=f"a last dimension that is a multiple of {info.type.block_elements}",
            hint="the file is damaged or incomplete: download or convert it again",
        )
    if info.offset % alignment:
        raise CheckpointError(
            "the tensor's data is misaligned",
            file=cursor.file.path,
            tensor=info.name,
            found=f"offset {info.offset}",
            expected=f"a multiple of general.alignment, {alignment}",
            hint="the file is damaged or incomplete: download or convert it again",
        )
    return StoredTensor(
        name=info.name,
        type_name=info.type.name,
        shape=info.shape,
        file=cursor.file,
        offset=data_start + info.offset,
        bytes=math.prod(info.shape) // info.type.block_elements * info.type.block_bytes,
    )
