"""safetensors checkpoints: a Hugging Face directory, sharded or not, with its config.json.

The header is parsed here, as strictly as the reference does it, because the `safetensors` package
hands out copies or framework tensors; the experts must stay views over the memory map.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freetoken.checkpoints.mapping import (
    MappedFile,
    map_file,
    parse_json_object,
    read_json_object,
)
from freetoken.checkpoints.quantized.config import join_scales
from freetoken.checkpoints.tables import FileCheckpoint, StoredTensor, check_extents
from freetoken.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_MAX_DIMENSIONS = 16
_LENGTH_BYTES = 8
_DOWNLOAD_AGAIN = "the file is damaged or incomplete: download it again"

# Bits per element. All types of the format, so that a tensor that nobody asks for does no harm.
_TYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


def open_safetensors(path: Path) -> FileCheckpoint:
    """Open a directory, or the directory of a .safetensors or index file.

    A file that an index beside it lists opens the whole sharded model. Raises CheckpointError.
    """
    if path.is_dir():
        directory, files, tensors = path, *_open_directory(path)
    elif path.name.endswith(".index.json"):
        directory, files, tensors = path.parent, *_open_sharded(path)
    else:
        directory, files, tensors = path.parent, *_open_file(path)
    config = _read_config(directory)
    generation = directory / "generation_config.json"
    return FileCheckpoint(
        kind="safetensors",
        path=directory,
        metadata=config,
        generation_config=read_json_object(generation) if os.path.lexists(generation) else {},
        files=files,
        tensors=join_scales(directory, config, tensors),
    )


def _read_config(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json"
    if not os.path.lexists(path):
        raise CheckpointError(
            "no config.json beside the tensors",
            file=path,
            found="nothing",
            expected="the model's config.json, which tells its architecture and sizes",
            hint="download the whole repository, not the tensor files alone",
        )
    return read_json_object(path)


def _open_directory(directory: Path) -> tuple[list[MappedFile], list[StoredTensor]]:
    """The index if there is one, else model.safetensors, else the only file."""
    if os.path.lexists(directory / INDEX_NAME):
        return _open_sharded(directory / INDEX_NAME)
    names = sorted(
        entry.name
        for entry in directory.iterdir()
        if entry.name.endswith(".safetensors") and not entry.name.startswith(".")
    )
    if SINGLE_NAME in names:
        names = [SINGLE_NAME]
    if len(names) != 1:
        raise CheckpointError(
            "several safetensors files without an index",
            file=directory,
            found=", ".join(names[:5]) + (", ..." if len(names) > 5 else ""),
            expected=f"{INDEX_NAME}, or {SINGLE_NAME}, or one file",
            hint=f"download {INDEX_NAME} too, or give the path of the one file to load",
        )
    return _open_single(directory / names[0])


def _open_file(path: Path) -> tuple[list[MappedFile], list[StoredTensor]]:
    index = path.parent / INDEX_NAME
    if os.path.lexists(index) and path.name in _read_weight_map(index).values():
        return _open_sharded(index)
    return _open_single(path)


def _open_single(path: Path) -> tuple[list[MappedFile], list[StoredTensor]]:
    file = map_file(path)
    return [file], read_tensors(file)


def _open_sharded(index: Path) -> tuple[list[MappedFile], list[StoredTensor]]:
    """All shards that the index lists. Index and shards must name the same tensors."""
    weight_map = _read_weight_map(index)
    files = [map_file(index.parent / name) for name in sorted(set(weight_map.values()))]
    tensors = [tensor for file in files for tensor in read_tensors(file)]
    stored = {(tensor.name, tensor.file.path.name) for tensor in tensors}
    listed = set(weight_map.items())
    for missing, problem, found in (
        (listed - stored, "a tensor of the index is missing", "no such tensor in the file"),
        (stored - listed, "a tensor is not in the index", f"no such entry in {index.name}"),
    ):
        if missing:
            name, shard = min(missing)
            raise CheckpointError(
                problem,
                file=index.parent / shard,
                tensor=name,
                found=f"{found} ({len(missing)} such tensors)",
                expected="the same tensors in the index and in its files",
                hint="index and files are of different versions: download all of them again",
            )
    return files, tensors


def _read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, every file in the index's own directory."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "the index has no weight_map",
            file=index,
            found=f"weight_map of type {type(weight_map).__name__}",
            expected="an object of tensor names and file names",
            hint=_DOWNLOAD_AGAIN,
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain_name(name):
            raise CheckpointError(
                "the index names an invalid file",
                file=index,
                tensor=tensor,
                found=repr(name),
                expected="the plain name of a .safetensors file in the same directory",
                hint=_DOWNLOAD_AGAIN,
            )
    return weight_map


def _is_plain_name(name: str) -> bool:
    return name.endswith(".safetensors") and Path(name).name == name and "\0" not in name


def read_tensors(file: MappedFile) -> list[StoredTensor]:
    """Parse and check the header of one file: every byte after it belongs to one tensor.

    Raises CheckpointError.
    """
    header_bytes = _header_bytes(file)
    data_start = _LENGTH_BYTES + header_bytes
    header = parse_json_object(file.map[_LENGTH_BYTES:data_start], file.path)
    header.pop("__metadata__", None)
    tensors = [_read_tensor(file, data_start, name, info) for name, info in header.items()]
    check_extents(tensors)
    used = sum(tensor.bytes for tensor in tensors)
    if used != file.bytes - data_start:
        raise CheckpointError(
            "bytes of the file belong to no tensor",
            file=file.path,
            found=f"{file.bytes - data_start} bytes of data",
            expected=f"{used}, the sum of its {len(tensors)} tensors",
            hint=_DOWNLOAD_AGAIN,
        )
    return tensors


def _header_bytes(file: MappedFile) -> int:
    stated = int.from_bytes(file.map[:_LENGTH_BYTES], "little")
    limit = min(file.bytes - _LENGTH_BYTES, _MAX_HEADER_BYTES)
    if stated > limit or file.map[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        raise CheckpointError(
            "not a safetensors file, or a truncated one",
            file=file.path,
            found=f"a header of {stated} bytes in a file of {file.bytes}, "
            f"first bytes {file.map[: _LENGTH_BYTES + 1]!r}",
            expected=f"8 bytes of length, then a JSON object of at most {max(limit, 0)} bytes",
            hint=_DOWNLOAD_AGAIN,
        )
    return stated


def _read_tensor(file: MappedFile, data_start: int, name: str, info: object) -> StoredTensor:
    def error(problem: str, found: object, expected: object) -> CheckpointError:
        return CheckpointError(
            problem,
            file=file.path,
            tensor=name,
            found=found,
            expected=expected,
            hint=_DOWNLOAD_AGAIN,
        )

    fields = {"dtype", "shape", "data_offsets"}
    if not isinstance(info, dict) or info.keys() != fields:
        raise error("invalid description", _shorten(info), f"an object of {sorted(fields)}")
    type_name, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(type_name, str) or type_name not in _TYPE_BITS:
        raise error("unknown type", _shorten(type_name), f"one of {', '.join(_TYPE_BITS)}")
    if not _is_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise error("invalid shape", _shorten(shape), f"up to {_MAX_DIMENSIONS} sizes >= 0")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise error("invalid data_offsets", _shorten(offsets), "[begin, end], begin <= end")
    bits = math.prod(shape) * _TYPE_BITS[type_name]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise error(
            "shape and data_offsets disagree",
            f"{offsets[1] - offsets[0]} bytes",
            f"{bits / 8:g} bytes for {type_name} of shape {shape}",
        )
    return StoredTensor(
        name=name,
        type_name=type_name,
        shape=tuple(shape),
        file=file,
        offset=data_start + offsets[0],
        bytes=offsets[1] - offsets[0],
    )


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 1 << 63 for item in value
    )


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
