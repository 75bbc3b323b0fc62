"""Hugging Face checkpoints that keep a quantised tensor in several, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from freetoken.checkpoints import Checkpoint, open_checkpoint
from freetoken.errors import CheckpointError
from freetoken.formats import DS_FP4, FP8_128, MXFP4_PAIRS, NVFP4, NVFP4_PAIRS
from support.checkpoint_files import is_mapped

Tensors = dict[str, torch.Tensor]

MXFP4 = {"quant_method": "mxfp4"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def bytes_of(*shape: int, kind: torch.dtype = torch.uint8) -> torch.Tensor:
    """Random bytes below 127: of no 8-bit float type a NaN."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8).view(kind)


def mxfp4_tensors() -> Tensors:
    return {
        "e.gate_up_proj_blocks": bytes_of(2, 6, 3, 16),
        "e.gate_up_proj_scales": bytes_of(2, 6, 3),
    }


def modelopt_tensors() -> Tensors:
    return {
        "a.weight": bytes_of(4, 16),
        "a.weight_scale": bytes_of(4, 2, kind=torch.float8_e4m3fn),
        "a.weight_scale_2": torch.tensor(0.25),
        "a.input_scale": torch.tensor(2.0),
        "a.k_scale": torch.tensor(2.0),
        "norm.weight": torch.ones(4),
    }


def compressed_tensors() -> Tensors:
    return {
        "a.weight_packed": bytes_of(4, 16),
        "a.weight_scale": bytes_of(4, 2, kind=torch.float8_e4m3fn),
        "a.weight_global_scale": torch.tensor([4.0]),
        "a.input_global_scale": torch.tensor([2.0]),
    }


def fp8_tensors() -> Tensors:
    return {
        "a.weight": bytes_of(576, 130, kind=torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.rand(5, 2),
        "b.weight": bytes_of(4, 32, kind=torch.int8),
        "b.scale": bytes_of(4, 2, kind=torch.float8_e8m0fnu),
    }


def save(directory: Path, quantization: Any, tensors: Tensors) -> Path:
    config = {"model_type": "mixtral", "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def opened(directory: Path, quantization: Any, tensors: Tensors) -> Checkpoint:
    return open_checkpoint(save(directory, quantization, tensors))


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


def test_gpt_oss_stacks_are_views_of_the_map(tmp_path: Path) -> None:
    tensors = mxfp4_tensors()
    checkpoint = opened(tmp_path, MXFP4, tensors)
    assert list(checkpoint.names()) == ["e.gate_up_proj"]
    entry = checkpoint.tensor("e.gate_up_proj")
    assert (entry.format, entry.shape) == (MXFP4_PAIRS, (2, 6, 96))
    assert entry.scales is not None and entry.factors is None
    assert is_mapped(entry.data) and is_mapped(entry.scales)
    np.testing.assert_array_equal(entry.data, raw(tensors["e.gate_up_proj_blocks"]))
    np.testing.assert_array_equal(entry.scales, raw(tensors["e.gate_up_proj_scales"]))
    assert entry.dequantize().shape == (2, 6, 96)


@pytest.mark.parametrize(
    ("quantization", "tensors"),
    [(MODELOPT, modelopt_tensors()), (COMPRESSED, compressed_tensors())],
    ids=["modelopt", "compressed-tensors"],
)
def test_nvfp4_factors_multiply_or_divide(
    quantization: Any, tensors: Tensors, tmp_path: Path
) -> None:
    checkpoint = opened(tmp_path, quantization, tensors)
    assert set(checkpoint.names()) == {"a.weight"} | ({"norm.weight"} & set(tensors))
    entry = checkpoint.tensor("a.weight")
    assert (entry.format, entry.shape) == (NVFP4_PAIRS, (4, 32))
    assert entry.factors is not None and float(entry.factors) == 0.25
    expected = NVFP4_PAIRS.dequantize_planes(
        entry.data.reshape(4, 16), raw(tensors["a.weight_scale"]).reshape(4, 2), 0.25
    )
    np.testing.assert_array_equal(entry.dequantize(), expected)


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_blocks_and_fp4_beside_them(scale_type: torch.dtype, tmp_path: Path) -> None:
    tensors = fp8_tensors()
    tensors["a.weight_scale_inv"] = tensors["a.weight_scale_inv"].to(scale_type)
    checkpoint = opened(tmp_path, FP8, tensors)
    assert set(checkpoint.names()) == {"a.weight", "b.weight"}
    fp8, fp4 = checkpoint.tensor("a.weight"), checkpoint.tensor("b.weight")
    assert (fp8.format, fp8.shape) == (FP8_128, (576, 130))
    assert (fp4.format, fp4.shape) == (DS_FP4, (4, 64))
    assert fp8.scales is not None and is_mapped(fp8.data)
    scales = tensors["a.weight_scale_inv"].float().numpy()
    np.testing.assert_array_equal(fp8.scales.view(np.float32).reshape(5, 2), scales)
    assert fp8.dequantize()[575, 129] == pytest.approx(
        float(tensors["a.weight"][575, 129].float()) * scales[4, 1]
    )


@pytest.mark.parametrize(
    ("quantization", "tensors", "change", "says"),
    [
        (MXFP4, mxfp4_tensors, {"e.gate_up_proj_scales": None}, "a tensor e.gate_up_proj_scales"),
        (MXFP4, mxfp4_tensors, {"e.gate_up_proj_blocks": None}, "same name with _blocks"),
        (MXFP4, mxfp4_tensors, {"e.gate_up_proj_scales": bytes_of(2, 6, 4)}, r"\[2, 6, 3\]"),
        (MXFP4, mxfp4_tensors, {"e.gate_up_proj_scales": torch.ones(2, 6, 3)}, "U8 or F8_E8M0"),
        (MXFP4, mxfp4_tensors, {"e.gate_up_proj_blocks": bytes_of(2, 6, 3, 8)}, "them 16"),
        (MODELOPT, modelopt_tensors, {"a.weight_scale": None}, "a tensor a.weight_scale\n"),
        (MODELOPT, modelopt_tensors, {"a.weight_scale_2": None}, "a tensor a.weight_scale_2"),
        (MODELOPT, modelopt_tensors, {"a.weight_scale": bytes_of(4, 2)}, r"F8_E4M3 \[4, 2\]"),
        (MODELOPT, modelopt_tensors, {"a.weight": bytes_of(4, 12)}, "a multiple of 16"),
        (MODELOPT, modelopt_tensors, {"a.weight": torch.ones(4, 32)}, "packed codes, U8"),
        (MODELOPT, modelopt_tensors, {"a.weight_scale_2": torch.ones(4)}, r"\[\] or \[1\]"),
        (COMPRESSED, compressed_tensors, {"a.weight_global_scale": None}, "whole tensor"),
        (COMPRESSED, compressed_tensors, {"a.weight_packed": None}, "end in weight_packed"),
        (FP8, fp8_tensors, {"a.weight_scale_inv": None}, "a tensor a.weight_scale_inv"),
        (FP8, fp8_tensors, {"a.weight_scale_inv": torch.rand(4, 2)}, r"\[5, 2\]"),
        (FP8, fp8_tensors, {"a.weight": None}, "beside it a tensor of that name"),
        (FP8, fp8_tensors, {"a.weight": torch.ones(576, 130)}, "F8_E4M3 or I8"),
        (FP8, fp8_tensors, {"b.scale": bytes_of(4, 3)}, r"F8_E8M0 or U8 \[4, 2\]"),
    ],
)
def test_scales_that_do_not_fit(
    quantization: Any, tensors: Any, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Missing, wrong and leftover scales: the error names file, tensor, found and expected."""
    changed = {**tensors(), **change}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=says) as caught:
        opened(tmp_path, quantization, kept)
    message = str(caught.value)
    for part in ("model.safetensors", "tensor '", "found:", "expected:", "what to do:"):
        assert part in message, message


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_factor_that_cannot_be_used(value: float, tmp_path: Path) -> None:
    tensors = compressed_tensors() | {"a.weight_global_scale": torch.tensor([value])}
    checkpoint = opened(tmp_path, COMPRESSED, tensors)
    with pytest.raises(CheckpointError, match=r"(?s)a\.weight_global_scale.*finite number"):
        checkpoint.tensor("a.weight")


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "awq"}, "mxfp4, modelopt"),
        ({"quant_method": ["fp8"]}, "mxfp4, modelopt"),
        ({}, "mxfp4, modelopt"),
        ("fp8", "an object"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "NVFP4"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "nvfp4-pack"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[128, 128\]"),
        ({"quant_method": "fp8"}, r"\[128, 128\]"),
    ],
)
def test_quantisations_that_are_not_supported(quantization: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        opened(tmp_path, quantization, {"norm.weight": torch.ones(4)})
    assert "config.json" in str(caught.value) and "what to do:" in str(caught.value)


def write_gguf(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, data in tensors.items():
        quantised = data.dtype == np.uint8
        kind = gguf.GGMLQuantizationType.NVFP4 if quantised else None
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_keeps_factors_of_nvfp4_in_tensors_of_their_own(tmp_path: Path) -> None:
    blocks = raw(bytes_of(3, 4, 36)).reshape(3, 4, 36)
    factors = np.array([1, 0.5, 3], np.float32)
    tensors = {
        "x.weight": blocks,
        "x.scale": factors,
        "x.input_scale": factors,
        "y.weight": blocks[0],
        "scale": np.ones(2, np.float32),
    }
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    assert set(checkpoint.names()) == {"x.weight", "y.weight", "scale"}
    entry = checkpoint.tensor("x.weight")
    assert (entry.format, entry.shape) == (NVFP4, (3, 4, 64))
    expected = NVFP4.dequantize(blocks) * factors[:, None, None]
    np.testing.assert_array_equal(entry.dequantize(), expected)
    assert checkpoint.tensor("y.weight").factors is None
    wrong = {"x.weight": blocks, "x.scale": np.ones(2, np.float32)}
    with pytest.raises(CheckpointError, match=r"(?s)x\.scale.*F32 \[2\].*\[3\]"):
        open_checkpoint(write_gguf(tmp_path / "wrong.gguf", wrong))
