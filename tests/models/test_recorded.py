"""Replayed decode steps against the same steps computed one operator at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken import _native
from freetoken.kernels.cpu import CpuOps
from freetoken.models import Phase
from freetoken.models.decoder import Decoder
from freetoken.models.recorded import RecordedDecoder
from freetoken.moe import OffloadMoeRuntime
from support.decoding import Runner
from support.tiny_models import make_model, save_hf, tiny_config

PROMPT = [3, 17, 99, 0, 42]


class CountedDecoder(Decoder):
    """Counts how often its operators are called from Python."""

    calls = 0

    def forward(self, *arguments: Any) -> torch.Tensor:
        self.calls += 1
        return super().forward(*arguments)


def runners(path: Path, ops: CpuOps) -> tuple[Runner, Runner, CountedDecoder]:
    """The same model plain and recorded, and the decoder inside the latter."""
    plain, recorded = Runner(path, ops, sequences=3), Runner(path, ops, sequences=3)
    inner = recorded.decoder
    inner.__class__ = CountedDecoder
    recorded.decoder = RecordedDecoder(inner, ops, recorded.runtime)
    return plain, recorded, inner


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "llama"])
def test_replayed_steps_are_the_same_to_the_bit(family: str, tmp_path: Path) -> None:
    save_hf(make_model(tiny_config(family)), tmp_path)
    ops = CpuOps(2)
    plain, recorded, counted = runners(tmp_path, ops)
    for runner in (plain, recorded):
        for sequence in range(3):
            runner.prefill(PROMPT, sequence)
    counted.calls = 0
    batches = [(0,), (0,), (1, 2), (2,), (1, 2), (0, 1, 2), (1, 0), *[(0,)] * 20, (2, 1, 0)]
    for step, sequences in enumerate(batches):
        fed = [(sequence, (7 * step + 5 * sequence) % 90) for sequence in sequences]
        expected = plain.step(Phase.DECODE, fed)
        assert torch.equal(recorded.step(Phase.DECODE, fed), expected), f"step {step}"
    assert counted.calls == 3, "one recording for each batch size, and nothing else from Python"
    if recorded.runtime is not None and plain.runtime is not None:
        assert recorded.runtime.stats() == plain.runtime.stats()
    ops.close()


def test_steps_that_cannot_be_replayed_run_as_they_are(tmp_path: Path) -> None:
    save_hf(make_model(tiny_config("qwen3_moe")), tmp_path)
    ops = CpuOps(1)
    plain, recorded, counted = runners(tmp_path, ops)
    for runner in (plain, recorded):
        runner.prefill(PROMPT)
    fed = [(0, 4), (1, 5)]
    for _ in range(2):
        expected = plain.step(Phase.DECODE, fed, padded_rows=1)
        assert torch.equal(recorded.step(Phase.DECODE, fed, padded_rows=1), expected)
    assert counted.calls == 3
    ops.close()


def test_only_the_strategy_cpu_is_nothing_but_operators(tmp_path: Path) -> None:
    save_hf(make_model(tiny_config("qwen3_moe")), tmp_path)
    ops = CpuOps(1)

    def can_record(strategy: str, **moe: int) -> bool:
        runtime = Runner(tmp_path, ops, strategy=strategy, **moe).runtime
        assert isinstance(runtime, OffloadMoeRuntime)
        return runtime.can_record

    assert can_record("cpu")
    assert not can_record("fused")
    assert not can_record("hybrid", cache_slots=4)
    ops.close()


def test_a_replay_checks_numbers_that_say_where_memory_is() -> None:
    context = _native.Context(1)
    codes = torch.arange(12, dtype=torch.float32).view(torch.uint8).numpy()
    w = _native.Matrix(_native.Format.F32, codes, 3, 4)
    ids, out = torch.tensor([2]), torch.zeros(1, 4)
    context.start_recording()
    with pytest.raises(RuntimeError, match="recording already"):
        context.start_recording()
    context.embed(w, ids, out)
    recording = context.stop_recording()
    ids[0] = 1
    context.replay(recording)
    assert out.tolist() == [[4.0, 5.0, 6.0, 7.0]]
    ids[0] = 3
    with pytest.raises(
        ValueError, match=r"ids: found 3 at position 0, expected numbers from 0 to 2"
    ):
        context.replay(recording)
    with pytest.raises(RuntimeError, match="not recording"):
        context.stop_recording()
    context.close()
    with pytest.raises(RuntimeError, match="closed"):
        context.replay(recording)


def test_an_operator_that_fails_ends_the_recording() -> None:
    ops = CpuOps(1)

    def fail() -> None:
        ops.to_float32(torch.zeros(2, 2))  # not float64

    with pytest.raises(TypeError):
        ops.record(fail)
    result, recording = ops.record(lambda: ops.to_float32(torch.ones(2, 2, dtype=torch.float64)))
    recording.replay()
    assert result.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    ops.close()
