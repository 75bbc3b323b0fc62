"""Tiny checkpoint files for tests: written byte by byte, so that any field can be wrong."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

UINT8, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 6, 7, 8, 9, 10


def gguf_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf_array(item_type: int, count: int, raw: bytes) -> bytes:
    return struct.pack("<IQ", item_type, count) + raw


def gguf_pair(key: str | bytes, value_type: int, value: bytes) -> bytes:
    return gguf_string(key) + struct.pack("<I", value_type) + value


@dataclass(frozen=True)
class RawTensor:
    """One tensor of a GGUF file. `dims` in the file's order, contiguous dimension first."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int

    def encode(self) -> bytes:
        dims = struct.pack(f"<I{len(self.dims)}Q", len(self.dims), *self.dims)
        return gguf_string(self.name) + dims + struct.pack("<IQ", self.type_id, self.offset)


ARCHITECTURE = gguf_pair("general.architecture", STRING, gguf_string("llama"))


def raw_gguf(
    pairs: Sequence[bytes] = (ARCHITECTURE,),
    tensors: Sequence[RawTensor] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    pair_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(pairs) if pair_count is None else pair_count,
    )
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs)
    header += b"".join(tensor.encode() for tensor in tensors)
    return header + b"\0" * (-len(header) % alignment) + data


def sample_gguf(version: int = 3) -> bytes:
    """A valid file with every kind of metadata value and several tensor types."""
    pairs = [
        ARCHITECTURE,
        gguf_pair("general.alignment", UINT32, struct.pack("<I", 32)),
        gguf_pair("a.u8", UINT8, b"\x07"),
        gguf_pair("a.u64", UINT64, struct.pack("<Q", 1 << 40)),
        gguf_pair("a.f32", FLOAT32, struct.pack("<f", 1.5)),
        gguf_pair("a.bool", BOOL, b"\1"),
        gguf_pair("a.words", ARRAY, gguf_array(STRING, 3, b"".join(map(gguf_string, "aé "[:3])))),
        gguf_pair("a.numbers", ARRAY, gguf_array(FLOAT32, 2, struct.pack("<2f", 1, 2))),
        gguf_pair("a.flags", ARRAY, gguf_array(BOOL, 3, b"\1\0\1")),
    ]
    tensors = [
        RawTensor("norm", (3,), 0, 0),
        RawTensor("q8", (32, 2), 8, 32),
        RawTensor("q4", (32, 1, 2), 2, 128),
        RawTensor("kq", (256,), 10, 192),
    ]
    data = np.random.default_rng(7).integers(0, 256, 192 + 84, dtype=np.uint8).tobytes()
    return raw_gguf(pairs, tensors, data, version=version)


def raw_safetensors(
    header: Mapping[str, Any] | bytes, data: bytes = b"", *, length: int | None = None
) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor_info(dtype: str, shape: Sequence[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def sample_safetensors() -> bytes:
    """A valid file with several types, an empty tensor and a scalar."""
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": tensor_info("F32", [2, 3], 0, 24),
        "b.weight": tensor_info("BF16", [2, 2], 24, 32),
        "c": tensor_info("F16", [], 32, 34),
        "empty": tensor_info("F32", [0, 4], 34, 34),
        "ids": tensor_info("I64", [2], 34, 50),
    }
    data = np.random.default_rng(8).integers(0, 256, 50, dtype=np.uint8).tobytes()
    return raw_safetensors(header, data)


FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def sample_quantized() -> dict[str, tuple[dict[str, Any], bytes]]:
    """Valid files of each quantisation, with what config.json says of it."""
    schemes: dict[str, tuple[dict[str, Any], dict[str, tuple[str, list[int]]]]] = {
        "mxfp4": (
            {"quant_method": "mxfp4"},
            {"a_blocks": ("U8", [1, 2, 1, 16]), "a_scales": ("U8", [1, 2, 1])},
        ),
        "modelopt": (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            {
                "a.weight": ("U8", [2, 8]),
                "a.weight_scale": ("F8_E4M3", [2, 1]),
                "a.weight_scale_2": ("F32", []),
            },
        ),
        "compressed-tensors": (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            {
                "a.weight_packed": ("U8", [2, 8]),
                "a.weight_scale": ("F8_E4M3", [2, 1]),
                "a.weight_global_scale": ("F32", [1]),
            },
        ),
        "fp8": (
            FP8_CONFIG,
            {"a.weight": ("F8_E4M3", [3, 5]), "a.weight_scale_inv": ("BF16", [1, 1])},
        ),
        "fp4": (FP8_CONFIG, {"a.weight": ("I8", [2, 16]), "a.scale": ("F8_E8M0", [2, 1])}),
    }
    widths = {"BF16": 2, "F32": 4}
    files = {}
    for scheme, (config, tensors) in schemes.items():
        header, end = {}, 0
        for name, (dtype, shape) in tensors.items():
            begin, end = end, end + int(np.prod(shape)) * widths.get(dtype, 1)
            header[name] = tensor_info(dtype, shape, begin, end)
        files[scheme] = config, raw_safetensors(header, bytes([0x3F]) * end)
    return files


def write_config(directory: Path, **values: Any) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "mixtral", **values}))


def is_mapped(array: np.ndarray) -> bool:
    """Whether the array's memory is that of an mmap, at the end of its chain of bases."""
    owner: object = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return isinstance(owner, mmap.mmap)
