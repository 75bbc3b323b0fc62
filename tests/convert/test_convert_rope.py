"""Rotary embeddings of converted files: the same logits whatever the scaling, and whatever a
config.json leaves unsaid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from freetoken.convert import convert
from freetoken.errors import CheckpointError
from support.conversion import GPT_OSS_ROPE, TOKENS, TOLERANCE, logits_of, model_of
from support.decoding import relative_error
from support.tiny_models import reference_logits, rewrite_config, save_hf

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
# what transformers assumes of gpt-oss
SILENT_GPT_OSS_ROPE = {**GPT_OSS_ROPE, "factor": 32.0, "original_max_position_embeddings": 4096}
THETAS = {"llama": 10000.0, "qwen3": 10000.0}


def _converted_error(model: Any, source: Path, folder: Path) -> float:
    made = convert(source, folder / "m.gguf", experts="F32")
    return relative_error(logits_of(made.path), reference_logits(model, TOKENS))


@pytest.mark.parametrize(
    ("family", "scaling", "theta"),
    [("llama", LINEAR, 5e5), ("llama", LLAMA3, 1e4), ("qwen3", YARN, 1e6)],
)
def test_scalings(family: str, scaling: dict[str, Any], theta: float, tmp_path: Path) -> None:
    model = model_of(family, rope_parameters={**scaling, "rope_theta": theta})
    assert _converted_error(model, save_hf(model, tmp_path / "hf"), tmp_path) < TOLERANCE


@pytest.mark.parametrize("head_dim", [2, 8, 128])
@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3, YARN], ids=lambda s: str(s)[:20])
@pytest.mark.parametrize("family", list(THETAS))
def test_a_config_without_a_base(
    family: str, scaling: dict[str, Any] | None, head_dim: int, tmp_path: Path
) -> None:
    meant = {"rope_type": "default", **(scaling or {}), "rope_theta": THETAS[family]}
    model = model_of(family, head_dim=head_dim, rope_parameters=meant)
    source = save_hf(model, tmp_path / "hf")
    rewrite_config(source, rope_parameters=..., rope_theta=..., rope_scaling=scaling)
    assert _converted_error(model, source, tmp_path) < TOLERANCE


def test_a_gpt_oss_config_that_says_nothing(tmp_path: Path) -> None:
    model = model_of("gpt_oss", swiglu_limit=7.0, rope_parameters=SILENT_GPT_OSS_ROPE)
    source = save_hf(model, tmp_path / "hf")
    rewrite_config(source, rope_parameters=..., rope_theta=..., rope_scaling=...)
    assert _converted_error(model, source, tmp_path) < TOLERANCE


def test_yarn_whose_bounds_gguf_readers_would_round(tmp_path: Path) -> None:
    model = model_of("qwen3", rope_parameters={**YARN, "truncate": False, "rope_theta": 1e6})
    source = save_hf(model, tmp_path / "hf")
    with pytest.raises(CheckpointError, match="found:    yarn with truncate False"):
        convert(source, tmp_path / "m.gguf", experts="F32")
