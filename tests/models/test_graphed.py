"""Decode steps as replays of graphs against the same steps computed one operator at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freetoken.kernels.cpu import CpuOps
from freetoken.models import Phase
from freetoken.models.decoder import Decoder
from freetoken.models.graphed import wrap_decoder
from freetoken.moe.step_guard import HandshakeGuard
from support.decoding import Runner
from support.tiny_models import make_model, save_hf, tiny_config
from support.traced_graphs import TracedExecutor, TracedGraphs, TracedOps, trace_runtime

PROMPT = [3, 17, 99, 0, 42]
SEQUENCES = 9


@pytest.fixture(scope="module")
def ops() -> Iterator[CpuOps]:
    ops = CpuOps(1)
    yield ops
    ops.close()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family that the tests use."""
    made = {}
    for family in ("llama", "qwen3_moe", "gpt_oss"):
        made[family] = tmp_path_factory.mktemp(family)
        save_hf(make_model(tiny_config(family, num_hidden_layers=2)), made[family])
    return made


class CountedDecoder(Decoder):
    """Counts how often its operators are called from Python."""

    calls = 0
    rows: tuple[int, ...] = ()

    def forward(self, batch: Any, *arguments: Any) -> Tensor:
        self.calls += 1
        self.rows += (len(batch.token_ids),)
        return super().forward(batch, *arguments)


class Pair:
    """One model plain, and one with graphs, fed alike."""

    def __init__(
        self,
        path: Path,
        ops: CpuOps,
        *,
        max_running: int = SEQUENCES,
        with_graphs: bool = True,
        tokens: int = 48,
        **options: Any,
    ) -> None:
        self.graphs = TracedGraphs()
        self.plain = Runner(path, ops, sequences=SEQUENCES, tokens=tokens, **options)
        self.graphed = Runner(
            path, TracedOps(self.graphs, ops), sequences=SEQUENCES, tokens=tokens, **options
        )
        self.executor: TracedExecutor | None = None
        runtime = self.graphed.runtime
        if runtime is not None:
            self.executor = trace_runtime(self.graphs, runtime)
        self.counted: CountedDecoder = self.graphed.decoder
        self.counted.__class__ = CountedDecoder
        self.decoder = wrap_decoder(
            self.counted,
            ops,
            runtime,
            self.graphs if with_graphs else None,
            self.executor and HandshakeGuard(self.executor, self.graphs.synchronize),
            max_running,
        )
        self.graphed.decoder = self.decoder

    @property
    def runners(self) -> tuple[Runner, Runner]:
        return self.plain, self.graphed

    def prefill(self, *sequences: int, prompt: list[int] = PROMPT) -> None:
        for runner in self.runners:
            for sequence in sequences:
                runner.prefill(prompt, sequence)

    def decode(self, sequences: tuple[int, ...], seed: int = 0) -> None:
        """A step of both, whose logits must be the same to the bit."""
        fed = [(sequence, (7 * seed + 5 * sequence) % 90) for sequence in sequences]
        expected = self.plain.step(Phase.DECODE, fed)
        assert torch.equal(self.graphed.step(Phase.DECODE, fed), expected), f"step {seed}"

    def check_traces(self) -> None:
        """Whatever a step leaves behind must be the same as well: keys and values outside the page
        of padded rows, counts, and which expert lies in which slot."""
        for plain, graphed in zip(self.plain._kv.keys, self.graphed._kv.keys, strict=True):
            assert torch.equal(plain[1:], graphed[1:])
        for plain, graphed in zip(self.plain._kv.values, self.graphed._kv.values, strict=True):
            assert torch.equal(plain[1:], graphed[1:])
        ours, theirs = self.graphed.runtime, self.plain.runtime
        if ours is None or theirs is None:
            return
        assert ours.stats() == theirs.stats()
        if ours.config.strategy in ("hybrid", "offload"):
            for layer_id in range(len(ours.experts)):
                assert ours.cache.resident(layer_id) == theirs.cache.resident(layer_id)
            ours.cache.check_integrity(contents=True)


STRATEGIES = {
    "cpu": {},
    "fused": {},
    "offload": {"cache_slots": 7},
    "hybrid": {"cache_slots": 4, "max_fetch": 1},
}
MODELS = [
    ("llama", {}),
    ("gpt_oss", {"strategy": "hybrid", "cache_slots": 3}),
    *(("qwen3_moe", {"strategy": name, **moe}) for name, moe in STRATEGIES.items()),
]
BATCHES = [(0,), (0,), (1, 2), (2, 1), (0, 1, 2), (1, 0), (3, 1, 0), (1, 0), (3,), (0, 1, 2, 3)]


@pytest.mark.parametrize(("family", "options"), MODELS)
def test_replayed_steps_are_the_same_to_the_bit(
    family: str, options: dict[str, Any], paths: dict[str, Path], ops: CpuOps
) -> None:
    pair = Pair(paths[family], ops, **options)
    pair.prefill(0, 1, 2, 3)
    pair.counted.calls = 0
    for step, sequences in enumerate(BATCHES * 3):
        pair.decode(sequences, step)
        pair.check_traces()
    eager = options.get("strategy") == "offload"  # the rung of 4 asks for more than the slots
    assert pair.graphs.captures == (2 if eager else 3)
    replayed = sum(len(batch) < 3 or not eager for batch in BATCHES * 3) - pair.graphs.captures
    assert pair.graphs.replays == replayed
    assert pair.counted.calls == len(BATCHES * 3) - replayed + pair.graphs.captures
