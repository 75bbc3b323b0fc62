"""Whole decoders on the Triton operators against the same on the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.kernels.triton import linear
from freetoken.kernels.triton.ops import TritonOps
from freetoken.models import Phase
from support.decoding import Runner, relative_error
from support.ops_under_test import make_ops
from support.tiny_models import make_model, save_hf, tiny_config

TOLERANCE = 1e-4  # relative to the largest logit: of sums in float32, as the CPU's tests have it
PROMPT = [3, 17, 99, 0, 42, 42]
SECOND = [100, 1, 1]
GENERATED = 3


@pytest.fixture(autouse=True)
def fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes longer per program than per row."""
    monkeypatch.setattr(linear, "_PROGRAMS", 8)


def runs(runner: Runner) -> torch.Tensor:
    """Logits of a prefill in two chunks, one of them alone; a batch of two sequences and a padded
    row; and some greedy steps. float32 [T, vocab]."""
    logits = [runner.prefill(PROMPT[:5]), runner.prefill(PROMPT[5:])]
    logits.append(runner.prefill(SECOND, sequence=1))
    pair = [(0, int(logits[1][-1].argmax())), (1, int(logits[2][-1].argmax()))]
    logits.append(runner.step(Phase.DECODE, pair, padded_rows=1))
    for _ in range(GENERATED):
        logits.append(runner.decode([int(logits[-1][0].argmax())]))
    return torch.cat(logits)


def same_tokens(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.argmax(dim=1), expected.argmax(dim=1))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mixtral", {"hidden_act": "gelu"}),
        ("qwen3_moe", {"mlp_only_layers": [1], "tie_word_embeddings": True}),
        ("gpt_oss", {}),
    ],
)
def test_float32_decoders(
    device: str, family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(tiny_config(family, **overrides), seed=3)
    path = save_hf(model, tmp_path)
    ours = runs(Runner(path, TritonOps(device, torch.float32), strategy="fused"))
    theirs = runs(Runner(path, make_ops("cpu-exact"), strategy="fused"))
    assert relative_error(ours, theirs) < TOLERANCE
    assert same_tokens(ours, theirs)
