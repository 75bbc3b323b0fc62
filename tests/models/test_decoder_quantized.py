"""Logits of quantised Hugging Face checkpoints against float32 models of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.checkpoints import open_checkpoint
from support.decoding import Runner, relative_error
from support.int8_bound import logit_bound
from support.ops_under_test import make_ops
from support.quantized_files import LAYOUTS, save_quantized
from support.tiny_models import make_model, reference_logits, rewrite_config, tiny_config

TOLERANCE = 1e-4
# The experts of DeepSeek's FP4 read activations rounded to e4m3, which has four significant bits.
FP8_TOLERANCE = 0.05
TOKENS = [3, 17, 99, 0, 42, 42]
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 96, "intermediate_size": 64},
    "qwen3_moe": {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 96},
}


def model_of(family: str, **overrides: Any) -> Any:
    sizes = {"num_hidden_layers": 2, **SIZES[family], **overrides}
    return make_model(tiny_config(family, **sizes), seed=1)


@pytest.mark.parametrize("ops", ["reference", "cpu-exact"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_logits_of_every_layout(family: str, layout: str, ops: str, tmp_path: Path) -> None:
    model = model_of(family, num_hidden_layers=1 if layout == "deepseek-fp4" else 2)
    reference = save_quantized(model, tmp_path, LAYOUTS[layout])
    runner = Runner(tmp_path, make_ops(ops))
    logits = torch.cat([runner.prefill(TOKENS[:4]), runner.decode(TOKENS[4:])])
    error = relative_error(logits, reference_logits(reference, TOKENS))
    assert error < (FP8_TOLERANCE if layout == "deepseek-fp4" else TOLERANCE)
    plain = relative_error(logits, reference_logits(model, TOKENS))
    assert plain > max(10 * TOLERANCE, error), "the weights were really rounded"


@pytest.mark.parametrize("ops", ["reference-int8", "cpu"])
@pytest.mark.parametrize("layout", ["mxfp4", "modelopt", "compressed-tensors"])
def test_int8_activations_stay_within_the_derived_bound(
    layout: str, ops: str, tmp_path: Path
) -> None:
    model = model_of("qwen3_moe", num_hidden_layers=1, hidden_size=32, moe_intermediate_size=32)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(0.3)
    reference = save_quantized(model, tmp_path, LAYOUTS[layout])
    logits = Runner(tmp_path, make_ops(ops)).prefill(TOKENS)
    error = (logits.double() - reference_logits(reference, TOKENS).double()).abs()
    assert bool((error <= logit_bound(reference, TOKENS)).all())
    assert float(error.max()) > 1e-3  # the activations were really rounded


@pytest.mark.parametrize("strategy", ["fused", "offload", "hybrid"])
@pytest.mark.parametrize(
    ("layout", "ops"),
    [
        ("mxfp4", "reference"),
        ("modelopt", "cpu-exact"),
        ("compressed-tensors", "reference"),
        ("fp8", "cpu-exact"),
    ],
)
def test_records_and_slots_hold_scales_and_factors(
    layout: str, ops: str, strategy: str, tmp_path: Path
) -> None:
    reference = save_quantized(model_of("qwen3_moe"), tmp_path, LAYOUTS[layout])
    runner = Runner(tmp_path, make_ops(ops), strategy=strategy)
    logits = torch.cat([runner.prefill(TOKENS[:3]), runner.decode(TOKENS[3:])])
    assert relative_error(logits, reference_logits(reference, TOKENS)) < TOLERANCE


def test_fp8_with_rows_beyond_the_last_whole_block(tmp_path: Path) -> None:
    """576 rows have 5 rows of scales, and the query projection ends within one."""
    model = model_of(
        "qwen3_moe",
        num_hidden_layers=1,
        hidden_size=160,
        moe_intermediate_size=576,
        num_experts=3,
        num_experts_per_tok=2,
    )
    reference = save_quantized(model, tmp_path, LAYOUTS["fp8"])
    entry = open_checkpoint(tmp_path).tensor("model.layers.0.mlp.experts.0.gate_proj.weight")
    assert entry.scales is not None and entry.scales.nbytes == 5 * 2 * 4
    logits = Runner(tmp_path, make_ops("cpu-exact")).prefill(TOKENS[:3])
    assert relative_error(logits, reference_logits(reference, TOKENS[:3])) < TOLERANCE


def test_modelopts_own_config_file(tmp_path: Path) -> None:
    import json

    reference = save_quantized(model_of("mixtral"), tmp_path, LAYOUTS["modelopt"])
    rewrite_config(tmp_path, quantization_config=...)
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization})
    )
    logits = Runner(tmp_path, make_ops("reference")).prefill(TOKENS)
    assert relative_error(logits, reference_logits(reference, TOKENS)) < TOLERANCE
