"""Sparse upcycling: a dense model's feed-forward layers become Mixtures of Experts.

The idea is Komatsuzaki et al., "Sparse Upcycling" (arXiv:2212.05055): every expert starts as a
copy of the dense layer. Here nothing is trained afterwards. Each expert is the dense layer plus
seeded noise of 2% of its weights' standard deviation, so that a wrong expert changes the logits
while the model still speaks; the router is a seeded normal matrix scaled by 1/sqrt(H).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

EXPERTS = 8
TOP_K = 2
NOISE = 0.02
SEED = 20240
PARTS = ("gate", "up", "down")
EXPERT_TYPE = gguf.GGMLQuantizationType.Q8_0

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Planned:
    """A tensor of the new file: its place is fixed before its bytes exist."""

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    bytes: int
    make: Callable[[], npt.NDArray[np.uint8]]


def upcycle(dense: Path, out: Path, description: str, progress: Progress) -> None:
    """Write `dense` (GGUF, architecture llama) as a Mixtral-like GGUF at `out`.

    `progress(done_bytes, total_bytes)` is called as tensors are written. Experts are made a tensor
    at a time, so memory stays bounded by two stacked tensors.
    """
    reader = gguf.GGUFReader(dense)
    plan = list(_plan(reader))
    writer = gguf.GGUFWriter(out, "llama")
    _copy_metadata(reader, writer)
    _describe(writer, description)
    for tensor in plan:
        # The writer takes byte shapes for quantised types and element shapes otherwise.
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, tensor.type)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), tensor.bytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total_bytes = sum(tensor.bytes for tensor in plan)
    done_bytes = 0
    for data in _made(plan):
        writer.write_tensor_data(data)
        done_bytes += data.nbytes
        progress(done_bytes, total_bytes)
    writer.close()


def _made(plan: list[_Planned]) -> Iterator[npt.NDArray[np.uint8]]:
    """The tensors' bytes in order, the next one in the making while one is written."""
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        ahead = [pool.submit(tensor.make) for tensor in plan[:2]]
        for tensor in plan[2:]:
            yield ahead.pop(0).result()
            ahead.append(pool.submit(tensor.make))
        for future in ahead:
            yield future.result()


def _plan(reader: gguf.GGUFReader) -> Iterator[_Planned]:
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        layer, part = _feed_forward(tensor.name)
        if part is None:
            data = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1)
            yield _Planned(
                tensor.name, shape, tensor.tensor_type, data.nbytes, partial(_same, data)
            )
            continue
        if part == "gate":
            router = _router(layer, hidden=shape[1])
            yield _Planned(
                f"blk.{layer}.ffn_gate_inp.weight",
                (EXPERTS, shape[1]),
                gguf.GGMLQuantizationType.F32,
                router.nbytes,
                partial(_same, router),
            )
        block, block_bytes = gguf.GGML_QUANT_SIZES[EXPERT_TYPE]
        yield _Planned(
            f"blk.{layer}.ffn_{part}_exps.weight",
            (EXPERTS, *shape),
            EXPERT_TYPE,
            EXPERTS * shape[0] * shape[1] // block * block_bytes,
            partial(_experts, tensor, layer, part),
        )


def _same(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return data


def _feed_forward(name: str) -> tuple[int, str | None]:
    """Layer and part of a dense feed-forward weight; the part is None for any other tensor."""
    pieces = name.split(".")
    if len(pieces) == 4 and pieces[2].removeprefix("ffn_") in PARTS:
        return int(pieces[1]), pieces[2].removeprefix("ffn_")
    return -1, None


def _router(layer: int, hidden: int) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng([SEED, layer])
    weights = rng.standard_normal((EXPERTS, hidden), dtype=np.float32) / np.float32(hidden**0.5)
    data: npt.NDArray[np.uint8] = weights.reshape(-1).view(np.uint8)
    return data


def _experts(tensor: gguf.ReaderTensor, layer: int, part: str) -> npt.NDArray[np.uint8]:
    weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    amplitude = np.float32(NOISE) * weights.std()
    packed = []
    for expert in range(EXPERTS):
        rng = np.random.default_rng([SEED, layer, PARTS.index(part), expert])
        noisy = weights + amplitude * rng.standard_normal(weights.shape, dtype=np.float32)
        packed.append(gguf.quants.quantize(noisy, EXPERT_TYPE).reshape(-1))
    return np.concatenate(packed)


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    """Everything that the source says of its geometry and its tokenizer."""
    for key, field in reader.fields.items():
        if not key.startswith(("llama.", "tokenizer.")):
            continue
        kind = field.types[0]
        if kind is gguf.GGUFValueType.ARRAY:
            writer.add_key_value(key, field.contents(), kind, sub_type=field.types[-1])
        else:
            writer.add_key_value(key, field.contents(), kind)


def _describe(writer: gguf.GGUFWriter, description: str) -> None:
    writer.add_name("FreeToken demo 8x135M")
    writer.add_description(description)
    writer.add_license("apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
