"""Hugging Face checkpoints in quantised layouts, made of a tiny transformers model with NumPy.

`save_quantized` writes the model's experts (and, for FP8, its dense linears) in a layout and
returns the float32 model that holds exactly the file's weights.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from freetoken.formats import DS_FP4, FP8_128, MXFP4_PAIRS, NVFP4_PAIRS
from support.tiny_models import rewrite_config, save_hf

Array = npt.NDArray[np.float32]
Tensors = dict[str, torch.Tensor]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])


@dataclass(frozen=True)
class Quantized:
    """One matrix: its tensors by the last part of their names, and the numbers they mean."""

    tensors: Tensors
    numbers: Array


@dataclass(frozen=True)
class Layout:
    """`quantize` turns a matrix [N, K] into tensors; `names` turns "...gate_proj.weight" and the
    key of a tensor into its name. `stacked`: experts are stacks [E, N, K], gate and up in one."""

    config: dict[str, Any]
    quantize: Callable[[Array], Quantized]
    stacked: bool = False
    dense: bool = False


def pair_codes(values: Array) -> npt.NDArray[np.uint8]:
    """The nearest e2m1 codes of scaled values [N, K], in pairs [N, K / 2]."""
    order = np.argsort(E2M1[:8])
    edges = (E2M1[order][1:] + E2M1[order][:-1]) / 2
    codes = np.digitize(np.abs(values), edges).astype(np.uint8)
    codes |= (values < 0).astype(np.uint8) << 3
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def e8m0_blocks(matrix: Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Codes in pairs and e8m0 scales of blocks of 32."""
    rows = len(matrix)
    largest = np.abs(matrix.reshape(rows, -1, 32)).max(axis=-1)
    exponent = np.ceil(np.log2(np.maximum(largest, 1e-30) / 6)).astype(np.int64)
    scaled = matrix / np.exp2(exponent).repeat(32, axis=1)
    return pair_codes(scaled.astype(np.float32)), (exponent + 127).astype(np.uint8)


def mxfp4(matrix: Array) -> Quantized:
    codes, scales = e8m0_blocks(matrix)
    tensors = {
        "_blocks": torch.from_numpy(codes).view(*scales.shape, 16),
        "_scales": torch.from_numpy(scales),
    }
    return Quantized(tensors, MXFP4_PAIRS.dequantize_planes(codes, scales))


def deepseek(matrix: Array) -> Quantized:
    codes, scales = e8m0_blocks(matrix)
    tensors = {
        "weight": torch.from_numpy(codes).view(torch.int8),
        "scale": torch.from_numpy(scales).view(torch.float8_e8m0fnu),
    }
    return Quantized(tensors, DS_FP4.dequantize_planes(codes, scales))


def nvfp4(matrix: Array, names: tuple[str, str, str], divides: bool) -> Quantized:
    rows, _ = matrix.shape
    blocks = np.abs(matrix.reshape(rows, -1, 16)).max(axis=-1)
    factor = np.float32(blocks.max() / (448 * 6))
    if divides:  # the file holds the inverse
        stored = np.float32(1) / factor
        factor = np.float32(1) / stored
    scales = torch.from_numpy(blocks / 6 / factor).to(torch.float8_e4m3fn)
    steps = scales.float().numpy().repeat(16, axis=1) * factor
    codes = pair_codes((matrix / np.maximum(steps, 1e-30)).astype(np.float32))
    tensors = {
        names[0]: torch.from_numpy(codes),
        names[1]: scales,
        names[2]: torch.tensor([stored if divides else factor]),
        "input_global_scale" if divides else "input_scale": torch.tensor([0.5]),
    }
    raw = scales.view(torch.uint8).numpy()
    return Quantized(tensors, NVFP4_PAIRS.dequantize_planes(codes, raw, factor))


def fp8(matrix: Array, scale_type: torch.dtype = torch.float32) -> Quantized:
    rows, cols = matrix.shape
    scale_rows, scale_bytes = FP8_128.scale_plane(rows, cols)
    scales = np.empty((scale_rows, scale_bytes // 4), np.float32)
    for i, j in np.ndindex(scales.shape):
        block = matrix[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        scales[i, j] = np.abs(block).max() / 448
    stored = torch.from_numpy(scales).to(scale_type)
    scales = stored.float().numpy()
    spread = scales.repeat(128, axis=0)[:rows].repeat(128, axis=1)[:, :cols]
    codes = torch.from_numpy(matrix / spread).to(torch.float8_e4m3fn)
    raw = codes.view(torch.uint8).numpy()
    numbers = FP8_128.dequantize_planes(raw, scales.view(np.uint8))
    return Quantized({"weight": codes, "weight_scale_inv": stored}, numbers)


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
LAYOUTS: dict[str, Layout] = {
    "mxfp4": Layout({"quant_method": "mxfp4"}, mxfp4, stacked=True),
    "modelopt": Layout(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda m: nvfp4(m, ("weight", "weight_scale", "weight_scale_2"), divides=False),
    ),
    "compressed-tensors": Layout(
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        lambda m: nvfp4(m, ("weight_packed", "weight_scale", "weight_global_scale"), divides=True),
    ),
    "fp8": Layout(_FP8, fp8, dense=True),
    "fp8-bf16-scales": Layout(_FP8, lambda m: fp8(m, torch.bfloat16), dense=True),
    "deepseek-fp4": Layout({**_FP8, "scale_fmt": "ue8m0"}, deepseek),
}


def save_quantized(model: Any, directory: Path, layout: Layout) -> Any:
    """Write `model` in the layout; the float32 model with the weights that the file means."""
    reference = copy.deepcopy(model)
    save_hf(model, directory)
    stored = load_file(directory / "model.safetensors")
    tensors: Tensors = {}
    numbers: dict[str, Array] = {}
    if layout.stacked:
        stored = dict(model.state_dict())
    for name, tensor in stored.items():
        for found, value in _stored(name, tensor, layout, numbers):
            tensors[found] = value.contiguous()
    save_file(tensors, directory / "model.safetensors")
    rewrite_config(directory, quantization_config=layout.config)
    _put(reference, numbers)
    return reference


def _stored(
    name: str, tensor: torch.Tensor, layout: Layout, numbers: dict[str, Array]
) -> Iterator[tuple[str, torch.Tensor]]:
    expert = ".experts." in name
    dense = layout.dense and tensor.dim() == 2 and name.endswith("_proj.weight")
    if not (expert or dense):
        yield name, tensor
        return
    if tensor.dim() == 3:
        parts = [layout.quantize(matrix.numpy()) for matrix in tensor]
        numbers[name] = np.stack([part.numbers for part in parts])
        for key in parts[0].tensors:
            yield name + key, torch.stack([part.tensors[key] for part in parts])
        return
    part = layout.quantize(tensor.numpy())
    numbers[name] = part.numbers
    for key, value in part.tensors.items():
        yield name.removesuffix("weight") + key, value


_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}


def _put(reference: Any, numbers: dict[str, Array]) -> None:
    """Overwrite the model's weights by those of the file, which has one tensor per expert."""
    state = reference.state_dict()
    with torch.no_grad():
        for name, values in numbers.items():
            found = torch.from_numpy(values)
            if name in state:
                state[name].copy_(found)
                continue
            prefix, expert, part, _ = name.rsplit(".", 3)
            layer = prefix.split(".experts")[0].replace("block_sparse_moe", "mlp")
            kind = _PARTS.get(part, part.removesuffix("_proj"))
            half = found.shape[0]
            if kind == "down":
                state[f"{layer}.experts.down_proj"][int(expert)].copy_(found)
                continue
            rows = slice(0, half) if kind == "gate" else slice(half, 2 * half)
            state[f"{layer}.experts.gate_up_proj"][int(expert), rows].copy_(found)


def edit_tensors(directory: Path, change: Callable[[Tensors], None]) -> None:
    """Let `change` add, replace or remove tensors of a saved checkpoint."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def edit_quantization(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    rewrite_config(directory, quantization_config={**config["quantization_config"], **changes})
