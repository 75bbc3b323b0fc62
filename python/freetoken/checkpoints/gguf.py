"""GGUF checkpoints: one file, or a set of parts named -00001-of-00003.gguf and so on."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from freetoken.checkpoints.gguf_header import GgufPart, read_gguf_part
from freetoken.checkpoints.mapping import map_file
from freetoken.checkpoints.quantized.gguf import join_factors
from freetoken.checkpoints.tables import FileCheckpoint
from freetoken.errors import CheckpointError

_PART_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_ALL_PARTS = "put all parts of the model, under their original names, into one directory"


def open_gguf(path: Path) -> FileCheckpoint:
    """Open a GGUF file, or a split model from any of its parts. Raises CheckpointError.

    The metadata is that of the first part.
    """
    opened = read_gguf_part(map_file(path))
    parts = _read_all_parts(path, opened)
    return FileCheckpoint(
        kind="gguf",
        path=path,
        metadata=parts[0].metadata,
        generation_config={},
        files=[part.file for part in parts],
        tensors=join_factors([tensor for part in parts for tensor in part.tensors]),
    )


def part_names(name: str) -> list[str]:
    """The file names of all parts of the split model that `name` belongs to; else `[name]`."""
    match = _PART_NAME.fullmatch(name)
    if match is None or int(match["count"]) == 0:
        return [name]
    prefix, count = match["prefix"], int(match["count"])
    return [f"{prefix}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def _read_all_parts(path: Path, opened: GgufPart) -> list[GgufPart]:
    names = part_names(path.name)
    count = opened.metadata.get("split.count", 1)
    if not isinstance(count, int) or count != len(names):
        raise CheckpointError(
            "the file's name and its metadata disagree about the number of parts",
            file=path,
            found=f"split.count {count!r}",
            expected=f"{len(names)}, as the name says",
            hint="give the parts their original names, such as model-00001-of-00003.gguf",
        )
    missing = [name for name in names if not os.path.lexists(path.parent / name)]
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise CheckpointError(
            "parts of the split model are missing",
            file=path,
            found=f"{len(names) - len(missing)} of {len(names)} parts; missing: {shown}",
            expected="all parts beside each other",
            hint=_ALL_PARTS,
        )
    if len(names) == 1:
        return [opened]
    parts = [
        opened if name == path.name else read_gguf_part(map_file(path.parent / name))
        for name in names
    ]
    _check_consistent(parts)
    return parts


def _check_consistent(parts: Sequence[GgufPart]) -> None:
    """Every part must state its own number and the same model as the first part."""
    first = parts[0].metadata
    for number, part in enumerate(parts):
        shared = ["split.count", "split.tensors.count"]
        shared += [key for key in ("general.architecture",) if key in part.metadata]
        expected = {"split.no": number, **{key: _scalar(first, key) for key in shared}}
        found = {key: _scalar(part.metadata, key) for key in expected}
        if found != expected:
            raise CheckpointError(
                "the part does not belong to this split model",
                file=part.file.path,
                found=found,
                expected=expected,
                hint=_ALL_PARTS,
            )
    tensors = sum(len(part.tensors) for part in parts)
    if tensors != _scalar(first, "split.tensors.count"):
        raise CheckpointError(
            "the split model has lost tensors",
            file=parts[0].file.path,
            found=f"{tensors} tensors in {len(parts)} parts",
            expected=f"split.tensors.count, {_scalar(first, 'split.tensors.count')}",
            hint="download or convert all parts again",
        )


def _scalar(metadata: Mapping[str, Any], key: str) -> int | str | None:
    """A value that can be compared; None if it is absent or of another kind."""
    value = metadata.get(key)
    return value if isinstance(value, int | str) else None
