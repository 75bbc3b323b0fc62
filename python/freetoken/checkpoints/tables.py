"""An open checkpoint as a table of tensors: what both file kinds come down to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from freetoken.checkpoints.base import TensorEntry
from freetoken.checkpoints.mapping import MappedFile
from freetoken.errors import CheckpointError
from freetoken.formats import FORMATS


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `bytes` bytes from `offset` of `file`.

    `type_name` is what the file calls its numbers, also if FreeToken has no such format. `shape`
    is row-major, in elements.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    file: MappedFile
    offset: int
    bytes: int

    def data(self) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, uint8 [bytes], over the map."""
        return self.file.data[self.offset : self.offset + self.bytes]

    def entry(self) -> TensorEntry:
        """Of a type that is a weight format (`FORMATS`)."""
        return TensorEntry(
            name=self.name,
            format=FORMATS[self.type_name],
            shape=self.shape,
            file=self.file.path,
            data=self.data(),
        )


class TableTensor(Protocol):
    """What the table holds: a stored tensor, or several that are one quantised tensor."""

    @property
    def name(self) -> str: ...

    @property
    def type_name(self) -> str: ...

    @property
    def file(self) -> MappedFile: ...

    def entry(self) -> TensorEntry: ...


def check_extents(tensors: Iterable[StoredTensor]) -> None:
    """Raise CheckpointError if a tensor leaves its file or two overlap. All are in one file."""
    end, previous = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.bytes)):
        if tensor.offset + tensor.bytes > tensor.file.bytes:
            raise CheckpointError(
                "the tensor's data ends beyond the end of the file",
                file=tensor.file.path,
                tensor=tensor.name,
                found=f"a file of {tensor.file.bytes} bytes",
                expected=f"at least {tensor.offset + tensor.bytes} bytes",
                hint="the file is truncated: download or convert it again",
            )
        if tensor.bytes and tensor.offset < end:
            raise CheckpointError(
                f"the tensor's data overlaps that of {previous!r}",
                file=tensor.file.path,
                tensor=tensor.name,
                found=f"data from byte {tensor.offset}",
                expected=f"from byte {end} on",
                hint="the file's header is damaged: download or convert it again",
            )
        if tensor.bytes:
            end, previous = tensor.offset + tensor.bytes, tensor.name


class FileCheckpoint:
    """A checkpoint in mapped files; implements the `Checkpoint` protocol.

    Raises CheckpointError if a tensor name occurs twice.
    """

    def __init__(
        self,
        kind: Literal["gguf", "safetensors"],
        path: Path,
        metadata: Mapping[str, Any],
        generation_config: Mapping[str, Any],
        files: Sequence[MappedFile],
        tensors: Iterable[TableTensor],
    ) -> None:
        self.kind: Literal["gguf", "safetensors"] = kind
        self.path = path
        self.metadata: Mapping[str, Any] = MappingProxyType(dict(metadata))
        self.generation_config: Mapping[str, Any] = MappingProxyType(dict(generation_config))
        self._file_bytes = sum(file.bytes for file in files)
        self._closed = False
        self._tensors: dict[str, TableTensor] = {}
        for tensor in tensors:
            other = self._tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise CheckpointError(
                    "the tensor occurs twice",
                    file=tensor.file.path,
                    tensor=tensor.name,
                    found=f"another one in {other.file.path}",
                    expected="every name once",
                    hint="remove files that do not belong to the checkpoint, or convert it again",
                )

    def names(self) -> Iterable[str]:
        return self._open_table().keys()

    def __contains__(self, name: str) -> bool:
        return name in self._open_table()

    def tensor(self, name: str) -> TensorEntry:
        table = self._open_table()
        if name not in table:
            similar = difflib.get_close_matches(name, table, n=3)
            raise CheckpointError(
                "no such tensor",
                file=self.path,
                tensor=name,
                found=f"{len(table)} tensors, similar: {', '.join(similar) or 'none'}",
                expected="the tensor that the model's architecture needs",
                hint="check that the checkpoint is complete and of the architecture it claims",
            )
        stored = table[name]
        if stored.type_name not in FORMATS:
            same = sum(other.type_name == stored.type_name for other in table.values())
            raise CheckpointError(
                "unsupported tensor type",
                file=stored.file.path,
                tensor=name,
                found=f"{stored.type_name} (the type of {same} of {len(table)} tensors)",
                expected=f"one of {', '.join(FORMATS)}",
                hint="use a checkpoint in a supported type, or convert this one",
            )
        return stored.entry()

    def file_bytes(self) -> int:
        return self._file_bytes

    def close(self) -> None:
        self._closed = True
        self._tensors = {}

    def _open_table(self) -> Mapping[str, TableTensor]:
        if self._closed:
            raise CheckpointError(
                "the checkpoint is closed",
                file=self.path,
                found="a request for its tensors",
                expected="requests before close()",
                hint="open it again",
            )
        return self._tensors
