"""Which scheme a Hugging Face checkpoint is quantised in: config.json's quantization_config, or
ModelOpt's own hf_quant_config.json."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from freetoken.checkpoints.mapping import read_json_object
from freetoken.checkpoints.quantized.base import Joined, ScaledTensor, Table, replaced
from freetoken.checkpoints.quantized.fp8 import join_fp8
from freetoken.checkpoints.quantized.mxfp4 import join_mxfp4
from freetoken.checkpoints.quantized.nvfp4 import COMPRESSED_TENSORS, MODELOPT, join_nvfp4
from freetoken.checkpoints.tables import StoredTensor
from freetoken.errors import CheckpointError

Scheme = Callable[[Table], Joined]

MODELOPT_NAME = "hf_quant_config.json"
_KEY = "quantization_config"
_SUPPORTED = (
    "mxfp4, modelopt (NVFP4), compressed-tensors (nvfp4-pack-quantized) or fp8 (128 x 128 blocks)"
)


def join_scales(
    directory: Path, config: Mapping[str, Any], stored: Sequence[StoredTensor]
) -> Iterable[StoredTensor | ScaledTensor]:
    """The table of a Hugging Face checkpoint: quantised tensors with their scales as one.

    Raises CheckpointError for a scheme that is not known, and for tensors that do not fit it.
    """
    scheme = _scheme(directory, config)
    if scheme is None:
        return stored
    return replaced(stored, scheme({tensor.name: tensor for tensor in stored}))


def _scheme(directory: Path, config: Mapping[str, Any]) -> Scheme | None:
    path, settings = directory / "config.json", config.get(_KEY)
    if settings is None and os.path.lexists(directory / MODELOPT_NAME):
        path = directory / MODELOPT_NAME
        settings = read_json_object(path).get("quantization")
        settings = {**settings, "quant_method": "modelopt"} if isinstance(settings, dict) else ()
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise _refused(path, _KEY, settings, "an object")
    method = settings.get("quant_method")
    schemes: dict[str, Callable[[Path, Mapping[str, Any]], Scheme]] = {
        "mxfp4": lambda *_: join_mxfp4,
        "modelopt": _modelopt,
        "modelopt_fp4": _modelopt,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
    }
    if not isinstance(method, str) or method not in schemes:
        raise _refused(path, "quant_method", method, _SUPPORTED)
    return schemes[method](path, settings)


def _modelopt(path: Path, settings: Mapping[str, Any]) -> Scheme:
    _require(path, settings, "quant_algo", ("NVFP4",))
    _require(path, settings, "group_size", (None, 16))
    return partial(join_nvfp4, layout=MODELOPT)


def _compressed_tensors(path: Path, settings: Mapping[str, Any]) -> Scheme:
    _require(path, settings, "format", ("nvfp4-pack-quantized",))
    return partial(join_nvfp4, layout=COMPRESSED_TENSORS)


def _fp8(path: Path, settings: Mapping[str, Any]) -> Scheme:
    _require(path, settings, "weight_block_size", ([128, 128],))
    _require(path, settings, "fmt", (None, "e4m3"))
    return join_fp8


def _require(path: Path, settings: Mapping[str, Any], key: str, allowed: Sequence[Any]) -> None:
    if settings.get(key) not in allowed:
        wanted = " or ".join(str(value) for value in allowed if value is not None)
        raise _refused(path, key, settings.get(key), wanted)


def _refused(path: Path, key: str, found: Any, expected: str) -> CheckpointError:
    return CheckpointError(
        f"key {key!r} of the quantisation cannot be used",
        file=path,
        found=repr(found)[:200],
        expected=expected,
        hint="use the original BF16 checkpoint, a GGUF file, or one of these quantisations",
    )
