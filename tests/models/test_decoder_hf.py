"""Logits of Hugging Face checkpoints against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.models import Phase
from support.decoding import Runner, relative_error
from support.ops_under_test import OPS, make_ops
from support.tiny_models import (
    FAMILIES,
    make_model,
    reference_logits,
    rewrite_config,
    save_hf,
    tiny_config,
)

TOLERANCE = 1e-4  # relative to the largest logit
FIRST = [3, 17, 99, 0, 42, 42, 7, 81, 5, 64, 23]
SECOND = [100, 1, 1, 50, 2, 77]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-tied-biased": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": None},
    ),
    "mistral-windowed": ("mistral", {"sliding_window": 4}),
    "mistral-windowed-gelu": ("mistral", {"sliding_window": 3, "hidden_act": "gelu"}),
    "qwen3-alternating": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "llama-gelu-tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mixtral-relu2": ("mixtral", {"hidden_act": "relu2"}),
    "qwen3_moe-gelu": ("qwen3_moe", {"hidden_act": "gelu", "mlp_only_layers": [1]}),
    "qwen3-later-layers-slide": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen3-wide-heads": (
        "qwen3",
        {"hidden_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 34},
    ),
    "qwen3-windowed-biased": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
            "attention_bias": True,
        },
    ),
    "mixtral-windowed-derived-heads": (
        "mixtral",
        {"sliding_window": 4, "head_dim": None, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "mixtral-tied-wide": (
        "mixtral",
        {"tie_word_embeddings": True, "hidden_size": 80, "num_local_experts": 3},
    ),
    "qwen3_moe-mixed-layers": (
        "qwen3_moe",
        {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers_on_the_reference_operators(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    model = make_model(tiny_config(family, **overrides), seed=len(case))
    runner = Runner(save_hf(model, tmp_path), make_ops("reference"))
    tokens = FIRST[:6]
    logits = torch.cat([runner.prefill(tokens[:4]), runner.decode(tokens[4:])])
    assert relative_error(logits, reference_logits(model, tokens)) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers_in_every_schedule(case: str, tmp_path: Path) -> None:
    """One prefill, chunks, token by token, and two sequences in the same batches."""
    family, overrides = CASES[case]
    model = make_model(tiny_config(family, **overrides), seed=len(case))
    path = save_hf(model, tmp_path)
    first, second = reference_logits(model, FIRST), reference_logits(model, SECOND)

    def runner() -> Runner:
        return Runner(path, make_ops("cpu"))

    whole = runner().prefill(FIRST)
    assert relative_error(whole, first) < TOLERANCE
    chunks = runner()
    chunked = torch.cat([chunks.prefill(FIRST[:4]), chunks.prefill(FIRST[4:9])])
    chunked = torch.cat([chunked, chunks.decode(FIRST[9:])])
    assert relative_error(chunked, first) < TOLERANCE
    assert relative_error(runner().decode(FIRST), first) < TOLERANCE

    together = runner()
    mixed = together.step(Phase.PREFILL, [(1, t) for t in SECOND[:2]] + [(0, t) for t in FIRST[:5]])
    assert relative_error(mixed, torch.cat([second[:2], first[:5]])) < TOLERANCE
    for i in range(4):
        pair = [(0, FIRST[5 + i]), (1, SECOND[2 + i])]
        logits = together.step(Phase.DECODE, pair, padded_rows=i)
        assert relative_error(logits, torch.stack([first[5 + i], second[2 + i]])) < TOLERANCE


@pytest.mark.parametrize(
    ("ops", "seed"), [("reference", 0), ("cpu", 0), ("cpu", 1), ("cpu", 2), ("cpu", 3)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_checkpoints_match_the_float32_model_of_the_same_weights(
    family: str, seed: int, ops: str, tmp_path: Path
) -> None:
    model = make_model(tiny_config(family), seed=seed, bf16_exact=True)
    path = save_hf(model, tmp_path, dtype=torch.bfloat16, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    logits = Runner(path, make_ops(ops)).prefill(FIRST)
    assert relative_error(logits, reference_logits(model, FIRST)) < TOLERANCE


@pytest.mark.parametrize("ops", OPS)
def test_f16_checkpoints(ops: str, tmp_path: Path) -> None:
    model = make_model(tiny_config("mixtral"), seed=4).half().float()
    path = save_hf(model, tmp_path, dtype=torch.float16)
    logits = Runner(path, make_ops(ops)).prefill(FIRST)
    assert relative_error(logits, reference_logits(model, FIRST)) < TOLERANCE


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_fused_expert_tensors(family: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = make_model(tiny_config(family), seed=2)
    save_hf(model, tmp_path)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in model.state_dict()
    logits = Runner(tmp_path, make_ops("reference")).prefill(FIRST)
    assert relative_error(logits, reference_logits(model, FIRST)) < TOLERANCE


ROPE_CASES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ROPE_CASES)
def test_scaled_rotary_embeddings(kind: str, spelling: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 5000.0, **ROPE_CASES[kind]}
    model = make_model(tiny_config("llama", rope_parameters=rope), seed=3)
    save_hf(model, tmp_path)
    if spelling == "rope_scaling":
        old = {("type" if k == "rope_type" else k): v for k, v in ROPE_CASES[kind].items()}
        rewrite_config(tmp_path, rope_parameters=..., rope_theta=5000.0, rope_scaling=old)
    logits = Runner(tmp_path, make_ops("reference")).prefill(FIRST)
    assert relative_error(logits, reference_logits(model, FIRST)) < TOLERANCE


@pytest.mark.parametrize("strategy", ["fused", "offload", "hybrid"])
def test_every_strategy_runs_under_the_decoder(strategy: str, tmp_path: Path) -> None:
    model = make_model(tiny_config("qwen3_moe", mlp_only_layers=[0]), seed=6)
    runner = Runner(save_hf(model, tmp_path), make_ops("reference"), strategy=strategy)
    logits = torch.cat([runner.prefill(FIRST[:5]), runner.decode(FIRST[5:])])
    assert relative_error(logits, reference_logits(model, FIRST)) < TOLERANCE
    assert runner.runtime is not None and runner.runtime.stats().total.steps > 0
