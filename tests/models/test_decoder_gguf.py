"""Logits of GGUF files against a float32 transformers model with the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from freetoken.models import Phase
from support.decoding import Runner, relative_error
from support.int8_bound import logit_bound
from support.ops_under_test import make_ops
from support.tiny_gguf import write_gguf
from support.tiny_models import FAMILIES, make_model, reference_logits, tiny_config

TOLERANCE = 1e-4
TOKENS = [3, 17, 99, 0, 42, 42]
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 96, "intermediate_size": 64},
    "qwen3": {"hidden_size": 96, "intermediate_size": 64},
    "mixtral": {"hidden_size": 96, "intermediate_size": 32},
    "qwen3_moe": {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 96},
}


def model_of(family: str, seed: int = 0, **overrides: Any) -> Any:
    return make_model(
        tiny_config(family, **{"num_hidden_layers": 2, **SIZES[family], **overrides}), seed=seed
    )


def widths(cols: int) -> dict[str, dict[str, Any]]:
    """Sizes for formats with blocks of `cols`."""
    return {
        "mixtral": {"hidden_size": cols, "intermediate_size": cols, "num_local_experts": 3},
        "qwen3_moe": {"hidden_size": cols, "moe_intermediate_size": cols, "num_experts": 4},
    }


@pytest.mark.parametrize("expert_type", [Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.F16, Q.BF16, Q.F32, Q.MXFP4])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_of_every_format(family: str, expert_type: Q, tmp_path: Path) -> None:
    tiny = write_gguf(model_of(family), tmp_path / "m.gguf", expert_type=expert_type)
    logits = Runner(tiny.path, make_ops("reference")).prefill(TOKENS)
    assert relative_error(logits, reference_logits(tiny.reference, TOKENS)) < TOLERANCE


@pytest.mark.parametrize("ops", ["reference", "cpu-exact"])
@pytest.mark.parametrize(
    ("family", "expert_type", "cols"),
    [
        ("mixtral", Q.Q4_K, 256),
        ("qwen3_moe", Q.Q5_K, 256),
        ("mixtral", Q.Q6_K, 256),
        ("qwen3_moe", Q.NVFP4, 64),
        ("mixtral", Q.MXFP4, 96),
        ("qwen3_moe", Q.Q4_0, 96),
    ],
)
def test_wide_blocks(family: str, expert_type: Q, cols: int, ops: str, tmp_path: Path) -> None:
    model = model_of(family, num_hidden_layers=1, **widths(cols)[family])
    tiny = write_gguf(model, tmp_path / "m.gguf", expert_type=expert_type)
    runner = Runner(tiny.path, make_ops(ops))
    logits = torch.cat([runner.prefill(TOKENS[:4]), runner.decode(TOKENS[4:])])
    assert relative_error(logits, reference_logits(tiny.reference, TOKENS)) < TOLERANCE


# As in Q4_K_M files: more bits for some layers' down and values, the head and the embedding.
MIXED = {
    "layers.0.mlp.experts.down_proj": Q.Q6_K,
    "layers.1.mlp.experts.down_proj": Q.Q5_K,
    "layers.1.mlp.experts.gate_up_proj": Q.MXFP4,
    "layers.0.self_attn.v_proj": Q.Q6_K,
    "self_attn.o_proj": Q.Q5_K,
    "lm_head": Q.Q6_K,
}


@pytest.mark.parametrize(
    ("ops", "strategy", "embedding_type"),
    [
        ("reference", "cpu", Q.Q4_K),
        ("reference", "hybrid", Q.Q6_K),
        ("cpu-exact", "cpu", Q.Q6_K),
        ("cpu-exact", "offload", Q.Q4_K),
    ],
)
def test_types_mixed_per_layer_and_part(
    ops: str, strategy: str, embedding_type: Q, tmp_path: Path
) -> None:
    model = model_of("qwen3_moe", num_attention_heads=8, head_dim=32, **widths(256)["qwen3_moe"])
    tiny = write_gguf(
        model,
        tmp_path / "m.gguf",
        expert_type=Q.Q4_K,
        dense_type=Q.Q4_K,
        embedding_type=embedding_type,
        types=MIXED,
    )
    runner = Runner(tiny.path, make_ops(ops), strategy=strategy)
    logits = torch.cat([runner.prefill(TOKENS[:4]), runner.decode(TOKENS[4:])])
    assert relative_error(logits, reference_logits(tiny.reference, TOKENS)) < TOLERANCE


@pytest.mark.parametrize("dense_type", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_1])
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_weights_of_every_format(family: str, dense_type: Q, tmp_path: Path) -> None:
    model = model_of(family, seed=2, head_dim=32)
    embedding_type = Q.Q8_0 if dense_type == Q.Q4_1 else dense_type
    tiny = write_gguf(
        model, tmp_path / "m.gguf", dense_type=dense_type, embedding_type=embedding_type
    )
    runner = Runner(tiny.path, make_ops("reference"))
    logits = torch.cat([runner.prefill(TOKENS[:4]), runner.decode(TOKENS[4:])])
    assert relative_error(logits, reference_logits(tiny.reference, TOKENS)) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": None, "num_attention_heads": 4, "num_key_value_heads": 2}),
        ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen3_moe", {"tie_word_embeddings": True, "attention_bias": True}),
    ],
)
def test_ties_and_biases(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    tiny = write_gguf(model_of(family, seed=3, **overrides), tmp_path / "m.gguf")
    runner = Runner(tiny.path, make_ops("reference"))
    assert runner.spec.tied_embeddings == overrides.get("tie_word_embeddings", False)
    logits = runner.prefill(TOKENS)
    assert relative_error(logits, reference_logits(tiny.reference, TOKENS)) < TOLERANCE


def test_one_tensor_per_expert(tmp_path: Path) -> None:
    tiny = write_gguf(model_of("mixtral"), tmp_path / "m.gguf", per_expert=True)
    assert any(t.name == "blk.0.ffn_gate.4.weight" for t in gguf.GGUFReader(tiny.path).tensors)
    logits = Runner(tiny.path, make_ops("reference")).prefill(TOKENS)
    assert relative_error(logits, reference_logits(tiny.reference, TOKENS)) < TOLERANCE


def test_rope_freqs_divide_the_frequencies(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = model_of("llama", rope_parameters=scaling)
    plain = model_of("llama").model.rotary_emb.inv_freq.numpy()
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 2
    tiny = write_gguf(model, tmp_path / "m.gguf", rope_freqs=factors)
    logits = Runner(tiny.path, make_ops("reference")).prefill(TOKENS)
    assert relative_error(logits, reference_logits(model, TOKENS)) < TOLERANCE


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_keys(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 64
    model = model_of("qwen3", rope_parameters=rope)
    keys = {
        "rope.scaling.type": (kind, gguf.GGUFValueType.STRING),
        "rope.scaling.factor": (4.0, gguf.GGUFValueType.FLOAT32),
        "rope.scaling.original_context_length": (64, gguf.GGUFValueType.UINT32),
    }
    tiny = write_gguf(model, tmp_path / "m.gguf", extra_keys=keys)
    logits = Runner(tiny.path, make_ops("reference")).prefill(TOKENS)
    assert relative_error(logits, reference_logits(model, TOKENS)) < TOLERANCE


@pytest.mark.parametrize("ops", ["reference-int8", "cpu"])
@pytest.mark.parametrize("expert_type", [Q.Q8_0, Q.Q4_0, Q.Q4_1])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_int8_activations_stay_within_the_derived_bound(
    family: str, expert_type: Q, ops: str, tmp_path: Path
) -> None:
    check_int8_bound(family, expert_type, ops, 32, tmp_path)


@pytest.mark.parametrize("ops", ["reference-int8", "cpu"])
@pytest.mark.parametrize(
    ("expert_type", "cols"),
    [(Q.Q4_K, 256), (Q.Q5_K, 256), (Q.Q6_K, 256), (Q.MXFP4, 64), (Q.NVFP4, 64)],
)
def test_int8_activations_with_wide_blocks(
    expert_type: Q, cols: int, ops: str, tmp_path: Path
) -> None:
    check_int8_bound("qwen3_moe", expert_type, ops, cols, tmp_path)


def check_int8_bound(family: str, expert_type: Q, ops: str, cols: int, tmp_path: Path) -> None:
    size = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    model = model_of(family, seed=5, num_hidden_layers=1, hidden_size=cols, **{size: cols})
    with torch.no_grad():  # experts that move the residual without drowning it
        model.model.layers[0].mlp.experts.down_proj.mul_(0.3 * 32 / cols)
    tiny = write_gguf(model, tmp_path / "m.gguf", expert_type=expert_type)
    expected = reference_logits(tiny.reference, TOKENS).double()
    bound = logit_bound(tiny.reference, TOKENS)
    runner = Runner(tiny.path, make_ops(ops))
    logits = torch.cat([runner.prefill(TOKENS[:4]), runner.decode(TOKENS[4:])])
    error = (logits.double() - expected).abs()
    assert bool((error <= bound).all())
    assert float(error.max()) > 1e-3 * 32 / cols  # the activations were really rounded
    wrong = tiny.reference
    with torch.no_grad():
        experts = wrong.model.layers[0].mlp.experts
        experts.down_proj.copy_(experts.down_proj.roll(1, dims=0))
    moved = (reference_logits(wrong, TOKENS).double() - expected).abs()
    # the bound is for the worst signs of all roundings; a wrong expert is far from what happens
    assert float(error.norm()) < 0.1 * float(moved.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_agree_with_the_reference_through_all_layers(
    family: str, tmp_path: Path
) -> None:
    model = model_of(family, seed=8, head_dim=32)
    tiny = write_gguf(
        model, tmp_path / "m.gguf", dense_type=Q.Q4_1, embedding_type=Q.Q8_0, expert_type=Q.Q8_0
    )
    both = []
    for ops in ("reference-int8", "cpu"):
        runner = Runner(tiny.path, make_ops(ops))
        prefill = runner.prefill(TOKENS[:4])
        pairs = [runner.step(Phase.DECODE, [(0, t), (1, t)]) for t in TOKENS[4:]]
        both.append(torch.cat([prefill, *pairs]))
    expected, found = both
    # A value within float32 noise of a rounding border may go to either side, and moves a logit by
    # a fraction of one int8 step; most logits agree to float32.
    close = (found - expected).abs() / expected.abs().max()
    assert float(close.median()) < TOLERANCE
    assert float(close.max()) < 1 / 127


def test_interleaved_rows_are_a_permutation_that_differs(tmp_path: Path) -> None:
    from support.tiny_gguf import interleave

    rows = np.arange(8).reshape(8, 1)
    assert interleave(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
