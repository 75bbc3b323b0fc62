"""The conversion: plan every tensor, write the header, then stream the numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from freetoken.checkpoints import open_checkpoint
from freetoken.checkpoints.base import Checkpoint
from freetoken.convert.metadata import check_described, write_metadata
from freetoken.convert.output import AtomicFile
from freetoken.convert.plan import PlannedTensor, plan_tensors
from freetoken.convert.quantizers import QUANTIZABLE
from freetoken.errors import ConfigError
from freetoken.formats import WeightFormat, by_name
from freetoken.models import read_spec

Progress = Callable[[str, int, int], None]
"""Called as progress(tensor, done_bytes, total_bytes)."""

_SMALL_BYTES = 1 << 16
# Formats whose tensors need a factor beside them; other programs know it of experts alone.
_EXPERTS_ONLY = ("NVFP4",)


@dataclass(frozen=True)
class Conversion:
    """What was written. `formats` counts bytes by format."""

    path: Path
    bytes: int
    tensors: int
    formats: dict[str, int]


def convert(
    model: str | Path,
    out: Path,
    *,
    experts: str,
    dense: str | None = None,
    progress: Progress = lambda _tensor, _done, _total: None,
) -> Conversion:
    """Write `model` (whatever LLM takes) to the GGUF file `out`.

    experts: the format of the experts' matrices. dense: of all other matrices; None keeps each as
    it is, or BF16 where GGUF has no such format. Norms, biases and routers become float32.

    Works on one expert, or some rows, at a time. The file appears under its name when it is whole
    and on disk; a run that was killed leaves a hidden file that the next run removes. Raises
    ConfigError for formats that cannot be written and for an output that exists, CheckpointError
    for a checkpoint that cannot be read or expressed, FreeTokenError if the disk is full.
    """
    expert_format = _writable("--experts", experts)
    dense_format = None if dense is None else _writable("--dense", dense)
    if dense_format is not None and dense_format.name in _EXPERTS_ONLY:
        raise ConfigError(f"--dense: {dense_format.name} is for experts; found in both options")
    _check_output(out)
    checkpoint = open_checkpoint(model)
    try:
        tensors = plan_tensors(checkpoint, read_spec(checkpoint), expert_format, dense_format)
        return _write(checkpoint, tensors, out, expert_format, progress)
    finally:
        checkpoint.close()


def _writable(option: str, name: str) -> WeightFormat:
    if name not in QUANTIZABLE:
        raise ConfigError(
            f"{option}: found {name!r}, expected one of {', '.join(QUANTIZABLE)} "
            "(what GGUF files can hold)"
        )
    return by_name(name)


def _check_output(out: Path) -> None:
    if out.is_symlink() and not out.exists():
        raise ConfigError(
            f"--out: {out} is a link to nothing ({os.readlink(out)}); name its target"
        )
    if out.exists():
        raise ConfigError(f"--out: {out} exists already; remove it, or choose another name")
    if not out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {out.parent}; create it first")


def _write(
    checkpoint: Checkpoint,
    tensors: list[PlannedTensor],
    out: Path,
    expert_format: WeightFormat,
    progress: Progress,
) -> Conversion:
    total_bytes = sum(tensor.bytes for tensor in tensors)
    with AtomicFile(out, total_bytes) as file:
        alignment = _write_header(checkpoint, tensors, file.partial, expert_format)
        places = _places(tensors, file.partial, alignment)
        placed = list(zip(tensors, places, strict=True))
        done_bytes = 0

        def write(tensor: PlannedTensor, place: int) -> None:
            nonlocal done_bytes
            stream.seek(place)
            for chunk in tensor.chunks():
                stream.write(np.ascontiguousarray(chunk).data)
                done_bytes += chunk.nbytes
                progress(tensor.name, done_bytes, total_bytes)

        with file.partial.open("r+b") as stream:
            # The small tensors first, for among them is what the description refers to.
            for tensor, place in placed:
                if tensor.bytes <= _SMALL_BYTES:
                    write(tensor, place)
            stream.flush()
            check_described(checkpoint, file.partial)
            for tensor, place in placed:
                if tensor.bytes > _SMALL_BYTES:
                    write(tensor, place)
        file.publish()
    formats: dict[str, int] = {}
    for tensor in tensors:
        formats[tensor.format.name] = formats.get(tensor.format.name, 0) + tensor.bytes
    return Conversion(out, out.stat().st_size, len(tensors), formats)


def _places(tensors: list[PlannedTensor], path: Path, alignment: int) -> list[int]:
    """Where each tensor begins; the file is made as long as it will be."""
    end = path.stat().st_size
    places = []
    for tensor in tensors:
        places.append(end + -end % alignment)
        end = places[-1] + tensor.bytes
    os.truncate(path, end + -end % alignment)
    return places


def _write_header(
    checkpoint: Checkpoint, tensors: list[PlannedTensor], path: Path, expert_format: WeightFormat
) -> int:
    """Everything before the numbers. Returns the alignment of tensors in bytes."""
    writer = gguf.GGUFWriter(path, arch="")
    writer.kv_data[0].clear()  # the architecture comes with the metadata
    try:
        write_metadata(checkpoint, writer, expert_format)
        for tensor in tensors:
            kind = gguf.GGMLQuantizationType[tensor.format.name]
            shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), tensor.bytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        return int(writer.data_alignment)
    finally:
        writer.close()
