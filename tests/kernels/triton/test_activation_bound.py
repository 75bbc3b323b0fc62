"""The bound on what a step allocates, against what decoders on the Triton operators do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken import gpu_budget
from freetoken.engine.loading import decoder_sizes
from freetoken.gpu_budget import decode_bytes, prefill_bytes
from freetoken.kernels.triton import linear
from freetoken.kernels.triton.ops import TritonOps
from freetoken.models import Phase
from support.live_bytes import LiveBytes
from support.on_device import fused_runner
from support.tiny_models import make_model, save_hf, tiny_config

SMALL_BYTES = 8 << 10  # of so small a model
TOKENS, SEQUENCES = 12, 3

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the allocator of a GPU says what it has given itself"
)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"num_hidden_layers": 2}),
        ("mixtral", {"num_hidden_layers": 1}),
        ("qwen3_moe", {"num_hidden_layers": 1, "moe_intermediate_size": 160}),
    ],
)
def test_a_step_stays_below_the_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    monkeypatch.setattr(linear, "_PROGRAMS", 8)  # the interpreter takes longer per program
    monkeypatch.setattr(gpu_budget, "SMALL_TENSORS_BYTES", SMALL_BYTES)
    path = save_hf(make_model(tiny_config(family, **overrides)), tmp_path)
    ops = TritonOps("cpu", torch.float32)
    runner = fused_runner(path, ops, sequences=SEQUENCES, tokens=TOKENS)
    sizes = decoder_sizes(runner.spec)
    prompts = [(i % SEQUENCES, 1 + i) for i in range(TOKENS)]
    steps = [
        (Phase.PREFILL, prompts, prefill_bytes(sizes, TOKENS, TOKENS)),
        (Phase.DECODE, prompts[:SEQUENCES], decode_bytes(sizes, SEQUENCES)),
    ]
    for phase, tokens, bound_bytes in steps:
        with LiveBytes() as live:
            runner.step(phase, tokens)
        assert bound_bytes / 8 < live.peak_bytes <= bound_bytes, phase
