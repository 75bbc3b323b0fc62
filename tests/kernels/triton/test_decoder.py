"""Whole decoders on the Triton operators against the same on the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Q

from freetoken.kernels.triton import linear
from freetoken.kernels.triton.ops import TritonOps
from freetoken.models import Phase
from support.decoding import Runner, relative_error
from support.on_device import fused_runner
from support.operator_cases import bfloat16_error
from support.ops_under_test import make_ops
from support.tiny_gguf import write_gguf
from support.tiny_models import make_model, save_hf, tiny_config

TOLERANCE = 1e-4  # relative to the largest logit: of sums in float32, as the CPU's tests have it
BIASES = {"attention_bias": True, "mlp_bias": True}
QUANTISED = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "head_dim": 32,
}
FIRST, SECOND = [3, 17, 28], [20, 1]  # together more than are multiplied one by one
SMALL = {"vocab_size": 29, "num_experts_per_tok": 2}


@pytest.fixture(autouse=True)
def fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes longer per program than per row."""
    monkeypatch.setattr(linear, "_PROGRAMS", 8)


def runs(runner: Runner, following: tuple[int, int, int] | None = None) -> torch.Tensor:
    """Logits of two sequences in one prefill, in one decode step with a padded row, and of the
    first alone: float32 [8, vocab]. The `following` tokens, or always the likeliest."""
    prompts = [(0, token) for token in FIRST] + [(1, token) for token in SECOND]
    prefill = runner.step(Phase.PREFILL, prompts)
    likeliest = prefill.argmax(dim=1).tolist()
    a, b, c = following or (likeliest[len(FIRST) - 1], likeliest[-1], None)
    both = runner.step(Phase.DECODE, [(0, a), (1, b)], padded_rows=1)
    alone = runner.decode([int(both[0].argmax()) if c is None else c])
    return torch.cat([prefill, both, alone])


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"num_hidden_layers": 2, "tie_word_embeddings": True, **BIASES}),
        ("mixtral", {"num_hidden_layers": 1, "hidden_act": "gelu"}),
        ("qwen3_moe", {"num_hidden_layers": 2, "mlp_only_layers": [1]}),
        ("gpt_oss", {"num_hidden_layers": 1, "sliding_window": 3}),
    ],
)
def test_float32_decoders(
    device: str, family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(tiny_config(family, **SMALL, **overrides), seed=3)
    path = save_hf(model, tmp_path)
    ours = runs(fused_runner(path, TritonOps(device, torch.float32)))
    theirs = runs(Runner(path, make_ops("cpu-exact"), strategy="fused"))
    assert relative_error(ours, theirs) < TOLERANCE
    assert torch.equal(ours.argmax(dim=1), theirs.argmax(dim=1))


def test_a_quantised_decoder_with_a_bfloat16_cache(device: str, tmp_path: Path) -> None:
    """Its weights are read alike, so only bfloat16 parts it from the CPU: queries, keys, values and
    shares of attention everywhere, and in prefill both factors of each of the layer's products.
    Every rounding moves what it is part of by 2^-9 of it at most; these are about 16 in a row for
    each layer and the head, and where they add up at their worst they move the logits so much."""
    config = tiny_config("qwen3_moe", **SMALL, **QUANTISED)
    tiny = write_gguf(
        make_model(config, seed=5),
        tmp_path / "m.gguf",
        expert_type=Q.Q4_0,
        types={"self_attn": Q.Q8_0, "lm_head": Q.Q4_0},
    )
    ours = runs(fused_runner(tiny.path, TritonOps(device)), (5, 6, 7))
    theirs = runs(Runner(tiny.path, make_ops("cpu-exact"), strategy="fused"), (5, 6, 7))
    error = relative_error(ours, theirs)
    assert TOLERANCE < error < 16 * 2 * bfloat16_error(device), "rounded to bfloat16, and no more"
