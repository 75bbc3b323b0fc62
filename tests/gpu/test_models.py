"""Whole tiny models on the GPU: the same greedy tokens from every strategy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Q
from gpu_device import Device

from freetoken import LLM, SamplingParams
from freetoken.engine import loading
from support.gpu_rig import DRY, needs_gpu
from support.tiny_gguf import write_gguf
from support.tiny_models import BYTE_VOCAB, make_model, save_hf, tiny_config

pytestmark = [pytest.mark.gpu, needs_gpu]

PROMPTS = [[3, 17, 99, 0, 42, 42], [100, 1]] + ([] if DRY else [[7] * 40])
TOKENS = 2 if DRY else 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
# Widths that are whole blocks of 32.
WHOLE_BLOCKS: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "vocab_size": BYTE_VOCAB}
OTHERS: list[dict[str, Any]] = [
    {"strategy": "hybrid", "cache_slots": 2, "max_fetch": 1},
    {"strategy": "cpu"},
    {"strategy": "offload", "cache_slots": 4},
    {"strategy": "hybrid", "cache_slots": 3, "max_fetch": 0},
    {"strategy": "hybrid", "cache_slots": 5},
]
MODELS = ["qwen3_moe"] if DRY else ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_moe Q4_0"]


@pytest.fixture(autouse=True)
def dry_platform(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a dry run `device="cuda"` is what stands in for it."""
    if DRY:
        from freetoken.kernels.triton import linear

        monkeypatch.setattr(linear, "_PROGRAMS", 8)  # the interpreter takes long per program
        select = loading.select_platform
        monkeypatch.setattr(
            loading,
            "select_platform",
            lambda name, threads, precision: (
                device.platform(threads, precision)
                if name == "cuda"
                else select(name, threads, precision)
            ),
        )


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, _, quantised = request.param.partition(" ")
    overrides: dict[str, Any] = {"vocab_size": BYTE_VOCAB}
    if quantised or family == "gpt_oss":
        overrides = {**WHOLE_BLOCKS, "intermediate_size": 64}
    if quantised:
        overrides["moe_intermediate_size"] = 32
    made = make_model(tiny_config(family, **overrides), seed=5)
    if quantised:
        path = tmp_path / "m.gguf"
        write_gguf(made, path, expert_type=Q[quantised], dense_type=Q.Q8_0, tokenizer=True)
        return path
    if family == "gpt_oss":
        path = tmp_path / "m.gguf"
        write_gguf(made, path, expert_type=Q.MXFP4, dense_type=Q.F32, tokenizer=True)
        return path
    return save_hf(made, tmp_path, tokenizer=True)


def generate(path: Path, device: str, **options: Any) -> list[tuple[int, ...]]:
    with LLM(path, device=device, threads=2, cpu_activations="exact", **options) as llm:
        together = llm.generate(PROMPTS, GREEDY)
        alone = llm.generate(PROMPTS[:1], GREEDY)
        assert llm.stats().config.strategy == options["strategy"]
    return [tuple(completion.token_ids) for completion in (*together, *alone)]


def common_start(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=True)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(a))


def test_all_strategies_give_the_same_tokens(model: Path) -> None:
    """Hybrid and cpu round as the others do, for their activations are exact."""
    expected = generate(model, "cuda", strategy="fused")
    assert all(len(tokens) == TOKENS for tokens in expected)
    assert len(set(expected[0])) > 1, "a model that says one thing shows nothing"
    for options in OTHERS[:2] if DRY else OTHERS:
        assert generate(model, "cuda", **options) == expected, options


def test_the_tokens_begin_as_on_the_cpu(model: Path) -> None:
    """Not all of them: keys and values are bfloat16 on the GPU, and a tie may fall otherwise."""
    on_gpu = generate(model, "cuda", strategy="hybrid", cache_slots=3, max_fetch=1)
    on_cpu = generate(model, "cpu", strategy="cpu")
    starts = [common_start(a, b) for a, b in zip(on_gpu, on_cpu, strict=True)]
    assert min(starts) >= 1, starts
    assert sum(start >= min(4, TOKENS) for start in starts) >= len(starts) - 1, starts
