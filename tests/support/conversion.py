"""Models to convert, and what to compare of the files made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.decoding import Runner
from support.ops_under_test import make_ops
from support.tiny_models import make_model, tiny_config

TOKENS = [3, 17, 99, 0, 42, 42]
TOLERANCE = 1e-4
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
    "rope_theta": 150000.0,
}


def model_of(family: str, **overrides: Any) -> Any:
    return make_model(tiny_config(family, **{"num_hidden_layers": 2, **overrides}), bf16_exact=True)


def logits_of(path: Path) -> torch.Tensor:
    return Runner(path, make_ops("reference")).prefill(TOKENS)


def rms_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).square().mean() / expected.square().mean()).sqrt())
