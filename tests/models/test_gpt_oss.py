"""gpt-oss against transformers: sinks, alternating windows, biases, clamped SwiGLU, YaRN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file, save_file

from freetoken.checkpoints import open_checkpoint
from freetoken.errors import CheckpointError
from freetoken.kernels.activations import ClampedSwiGlu
from freetoken.models import Phase, read_spec
from support.decoding import Runner, relative_error
from support.ops_under_test import OPS, make_ops
from support.quantized_files import e8m0_blocks
from support.tiny_gguf import write_gguf
from support.tiny_models import (
    make_model,
    reference_logits,
    rewrite_config,
    save_hf,
    tiny_config,
)

TOLERANCE = 1e-4  # relative to the largest logit
TOKENS = [3, 17, 99, 0, 42, 42, 7, 81, 5, 64, 23]
STRATEGIES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "fused": {},
    "offload": {"cache_slots": 5},
    "hybrid": {"cache_slots": 3, "max_fetch": 1},
}


def model_of(**overrides: Any) -> Any:
    return make_model(tiny_config("gpt_oss", **overrides), seed=11)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ops", OPS)
def test_logits_match_transformers_in_every_schedule(
    ops: str, strategy: str, tmp_path: Path
) -> None:
    model = model_of()
    path = save_hf(model, tmp_path)
    expected = reference_logits(model, TOKENS)

    def runner() -> Runner:
        return Runner(path, make_ops(ops), strategy=strategy, **STRATEGIES[strategy])

    assert relative_error(runner().prefill(TOKENS), expected) < TOLERANCE
    if ops == "reference":  # slow
        return
    chunks = runner()
    chunked = [chunks.prefill(TOKENS[:4]), chunks.prefill(TOKENS[4:9]), chunks.decode(TOKENS[9:])]
    assert relative_error(torch.cat(chunked), expected) < TOLERANCE
    assert relative_error(runner().decode(TOKENS), expected) < TOLERANCE
    together = runner()
    together.step(Phase.PREFILL, [(1, t) for t in TOKENS[:7]] + [(0, t) for t in TOKENS[:5]])
    pair = together.step(Phase.DECODE, [(0, TOKENS[5]), (1, TOKENS[7])], padded_rows=2)
    assert relative_error(pair, expected[[5, 7]]) < TOLERANCE


@pytest.mark.parametrize("ops", OPS)
def test_bf16_checkpoints(ops: str, tmp_path: Path) -> None:
    model = make_model(tiny_config("gpt_oss"), seed=12, bf16_exact=True)
    path = save_hf(model, tmp_path, dtype=torch.bfloat16)
    runner = Runner(path, make_ops(ops))
    logits = torch.cat([runner.prefill(TOKENS[:5]), runner.decode(TOKENS[5:])])
    assert relative_error(logits, reference_logits(model, TOKENS)) < TOLERANCE


@pytest.mark.parametrize("missing", ["sinks", "bias", "window", "limit"])
def test_each_of_its_traits_moves_the_logits(missing: str, tmp_path: Path) -> None:
    """So that agreement with transformers means that all of them are there."""
    model = model_of()
    expected = reference_logits(model, TOKENS)
    if missing == "window":
        model.config.layer_types = ["full_attention"] * 3
        model = make_model(model.config, seed=11)
    elif missing == "limit":
        model = model_of(swiglu_limit=100.0)
    else:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if missing == "sinks" and name.endswith("sinks"):
                    parameter.fill_(-100.0)
                if missing == "bias" and ".experts." in name and name.endswith("_bias"):
                    parameter.zero_()
    moved = reference_logits(model, TOKENS)
    assert relative_error(moved, expected) > 100 * TOLERANCE
    logits = Runner(save_hf(model, tmp_path), make_ops("reference")).prefill(TOKENS)
    assert relative_error(logits, moved) < TOLERANCE


def save_mxfp4(model: Any, directory: Path) -> Any:
    """The published layout: experts as MXFP4 blocks and scales [E, N, K/32, ...]. Returns the model
    with the rounded weights."""
    save_hf(model, directory)
    tensors = load_file(directory / "model.safetensors")
    state = model.state_dict()
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        rows = tensors.pop(name).transpose(1, 2).contiguous()  # [E, N, K]
        experts, height, width = rows.shape
        codes, scales = e8m0_blocks(rows.reshape(-1, width).numpy())
        tensors[f"{name}_blocks"] = torch.from_numpy(
            np.ascontiguousarray(codes).reshape(experts, height, width // 32, 16)
        )
        tensors[f"{name}_scales"] = torch.from_numpy(
            np.ascontiguousarray(scales).reshape(experts, height, width // 32)
        )
    save_file(tensors, directory / "model.safetensors")
    rewrite_config(directory, quantization_config={"quant_method": "mxfp4"})
    checkpoint = open_checkpoint(directory)
    with torch.no_grad():
        for name, value in state.items():
            if name.endswith(("gate_up_proj", "down_proj")):
                value.copy_(torch.from_numpy(checkpoint.tensor(name).dequantize()).transpose(1, 2))
    checkpoint.close()
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mxfp4_experts_in_place(strategy: str, tmp_path: Path) -> None:
    model = model_of(hidden_size=64, intermediate_size=32, num_hidden_layers=2)
    plain = reference_logits(model, TOKENS)
    expected = reference_logits(save_mxfp4(model, tmp_path), TOKENS)
    assert relative_error(plain, expected) > 100 * TOLERANCE, "the weights were really rounded"
    runner = Runner(tmp_path, make_ops("reference"), strategy=strategy, **STRATEGIES[strategy])
    logits = torch.cat([runner.prefill(TOKENS[:5]), runner.decode(TOKENS[5:])])
    assert relative_error(logits, expected) < TOLERANCE


def test_mxfp4_experts_on_the_kernels(tmp_path: Path) -> None:
    """int8 activations move a logit by a fraction of an int8 step; nothing larger may happen."""
    model = model_of(hidden_size=64, intermediate_size=32, num_hidden_layers=1)
    save_mxfp4(model, tmp_path)
    found = Runner(tmp_path, make_ops("cpu")).prefill(TOKENS)
    expected = Runner(tmp_path, make_ops("reference-int8")).prefill(TOKENS)
    close = (found - expected).abs() / expected.abs().max()
    assert float(close.median()) < TOLERANCE and float(close.max()) < 1 / 127


@pytest.mark.parametrize("expert_type", [Q.F32, Q.BF16, Q.Q8_0])
def test_gguf(expert_type: Q, tmp_path: Path) -> None:
    model = model_of(hidden_size=64, intermediate_size=32, swiglu_limit=7.0)
    tiny = write_gguf(model, tmp_path / "m.gguf", expert_type=expert_type)
    expected = reference_logits(tiny.reference, TOKENS)
    for ops in ("reference", "cpu") if expert_type != Q.Q8_0 else ("reference",):
        runner = Runner(tiny.path, make_ops(ops), strategy="hybrid", cache_slots=2)
        logits = torch.cat([runner.prefill(TOKENS[:5]), runner.decode(TOKENS[5:])])
        assert relative_error(logits, expected) < TOLERANCE


def test_what_the_config_says_and_what_it_leaves_out(tmp_path: Path) -> None:
    path = save_hf(model_of(), tmp_path)
    spec = read_spec(open_checkpoint(path))
    assert spec.windows == (4, None, 4)
    assert spec.mlps[0].activation == ClampedSwiGlu(1.702, 1.5)
    rewrite_config(path, layer_types=..., rope_parameters=..., swiglu_limit=..., swiglu_alpha=...)
    silent = read_spec(open_checkpoint(path))
    assert silent.windows == spec.windows
    assert silent.rotary == spec.rotary
    assert silent.mlps[0].activation == ClampedSwiGlu(1.702, 7.0)
    assert silent.rotary.attention_factor == pytest.approx(0.1 * np.log(32.0) + 1)
    rewrite_config(path, hidden_act="gelu")
    with pytest.raises(CheckpointError, match="gpt-oss's own activation"):
        read_spec(open_checkpoint(path))


def test_missing_sinks_and_biases_are_listed(tmp_path: Path) -> None:
    path = save_hf(model_of(), tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.self_attn.sinks"]
    del tensors["model.layers.2.mlp.experts.down_proj_bias"]
    del tensors["model.layers.0.mlp.router.bias"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        Runner(path, make_ops("reference"))
    for name in (
        "model.layers.1.self_attn.sinks [3]",
        "model.layers.2.mlp.experts.down_proj_bias [6, 48]",
        "model.layers.0.mlp.router.bias [6]",
    ):
        assert name in str(caught.value)
