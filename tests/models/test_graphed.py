"""Decode steps as replays of graphs against the same steps computed one operator at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken import _native
from freetoken.kernels.cpu import CpuOps
from freetoken.kvcache import KVCache
from freetoken.models import Phase
from freetoken.models.decoder import Decoder
from freetoken.models.graphed import GraphedDecoder, ladder, wrap_decoder
from freetoken.moe.step_guard import DeviceGuard
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
            self.executor and DeviceGuard(self.graphs.synchronize, self.executor),
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


def test_every_batch_size_is_padded_to_its_rung(paths: dict[str, Path], ops: CpuOps) -> None:
    pair = Pair(paths["qwen3_moe"], ops, strategy="hybrid", cache_slots=4, max_fetch=1)
    pair.prefill(*range(SEQUENCES))
    pair.counted.rows = ()
    for step in range(3):
        for size in range(1, SEQUENCES + 1):
            pair.decode(tuple(range(size))[::-1], step * SEQUENCES + size)
            pair.check_traces()
    assert pair.counted.rows == (1, 2, 4, 4, 8, 8, 9, 1, 2, 9), "each rung eagerly, then captured"
    assert pair.graphs.replays == 3 * SEQUENCES - 5


@pytest.mark.parametrize(
    ("max_running", "rungs"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 9)),
        (33, (1, 2, 4, 8, 16, 24, 32, 33)),
    ],
)
def test_the_ladder_ends_with_the_most_that_can_run(max_running: int, rungs: tuple[int]) -> None:
    assert ladder(max_running) == rungs


def test_the_ladder_is_not_longer_than_graphs_pay() -> None:
    assert ladder(1000)[-1] == 256


def test_block_tables_grow_between_replays(paths: dict[str, Path], ops: CpuOps) -> None:
    pair = Pair(paths["llama"], ops)
    pair.prefill(0, 1, 2)
    for step in range(42):
        pair.decode((2, 0, 1) if step % 2 else (0, 1), step)
    pair.check_traces()
    assert pair.graphs.replays == 40


def test_the_fetch_cap_changes_between_replays(paths: dict[str, Path], ops: CpuOps) -> None:
    pair = Pair(paths["qwen3_moe"], ops, strategy="hybrid", cache_slots=3, max_fetch=0)
    pair.prefill(0, 1)
    fetched = []
    for step in range(24):
        for runner in pair.runners:
            assert runner.runtime is not None
            runner.runtime.cache.cap.set((0, 1, 3)[step // 8])
        pair.decode((0, 1), step)
        pair.check_traces()
        assert pair.graphed.runtime is not None
        fetched.append(pair.graphed.runtime.stats().total.fetched)
    assert fetched[0] == fetched[7] < fetched[15] < fetched[23]
    assert pair.graphs.captures == 1
    assert pair.graphs.replays == 23


def test_a_thousand_replays(paths: dict[str, Path], ops: CpuOps) -> None:
    """Any number of rows, sequences that end and begin again, and ever other experts."""
    moe = {"strategy": "hybrid", "cache_slots": 3, "max_fetch": 1}
    pair = Pair(paths["qwen3_moe"], ops, max_running=4, **moe)
    rng = np.random.default_rng(7)
    for step in range(1000):
        size = int(rng.integers(1, 5))
        chosen = rng.permutation(SEQUENCES)[:size].tolist()
        for sequence in chosen:
            if pair.plain.fed[sequence] == 48:
                for runner in pair.runners:
                    runner.fed[sequence] = 0
        pair.decode(tuple(chosen), int(rng.integers(1000)))
        if step % 100 == 99:
            pair.check_traces()
    assert pair.graphs.replays == 1000 - 3
    stats = pair.graphed.runtime and pair.graphed.runtime.stats().total
    assert stats
    assert stats.steps == 1000
    assert min(stats.hits, stats.fetched, stats.cpu) > 500


def test_all_graphs_leave_their_logits_in_one_place(paths: dict[str, Path], ops: CpuOps) -> None:
    """A vocabulary for each row of the ladder would be gigabytes."""
    pair = Pair(paths["llama"], ops, max_running=4)
    pair.prefill(*range(4))
    for size in (1, 2, 4):
        for _ in range(3):
            pair.decode(tuple(range(size)))
    outputs = [graph.output.untyped_storage() for graph in pair.graphs._graphs]
    assert len(outputs) == 3
    assert len({output.data_ptr() for output in outputs}) == 1
    assert outputs[0].nbytes() == 4 * pair.counted.spec.vocab * 4


# Where there is no replay --------------------------------------------------------------------


def test_a_capture_that_fails_leaves_the_rung_eager(
    paths: dict[str, Path], ops: CpuOps, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(paths["qwen3_moe"], ops, strategy="hybrid", cache_slots=4, max_fetch=1)
    pair.prefill(0, 1)
    pair.graphs.capture_errors = [RuntimeError("operation not permitted when stream is capturing")]
    with caplog.at_level(logging.WARNING):
        for step in range(6):
            pair.decode((0,), step)
            pair.check_traces()
    assert len(caplog.records) == 1
    assert "up to 1 sequences" in caplog.text
    assert "RuntimeError: operation not permitted when stream is capturing" in caplog.text
    assert (pair.graphs.captures, pair.graphs.replays) == (0, 0)
    for step in range(6, 9):  # another rung
        pair.decode((0, 1), step)
        pair.check_traces()
    assert (pair.graphs.captures, pair.graphs.replays) == (1, 2)


def test_reading_a_value_while_capturing_is_such_a_failure(
    paths: dict[str, Path], ops: CpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(paths["llama"], ops)
    pair.prefill(0)
    rotations = Decoder.rotations
    monkeypatch.setattr(
        Decoder,
        "rotations",
        lambda self, positions: rotations(self, positions + int(positions.max()) * 0),
    )
    for step in range(4):
        pair.decode((0,), step)
    assert (pair.graphs.captures, pair.graphs.replays) == (0, 0)


def test_steps_that_are_not_for_graphs_run_as_they_are(paths: dict[str, Path], ops: CpuOps) -> None:
    pair = Pair(paths["llama"], ops, max_running=2)
    for _ in range(3):  # one token each
        for runner in pair.runners:
            runner.prefill([4], 0)
    pair.prefill(1, 2)
    for step in range(3):
        pair.decode((0, 1, 2), step)  # larger than the largest rung
    for _ in range(3):
        found, expected = (
            runner.step(Phase.DECODE, [(0, 4)], padded_rows=1) for runner in pair.runners[::-1]
        )
        assert torch.equal(found, expected)  # logits of some rows only
    assert (pair.graphs.captures, pair.graphs.replays) == (0, 0)
    pair.check_traces()


def test_a_step_with_rows_that_are_nobodys_and_all_logits_is_replayed(
    paths: dict[str, Path], ops: CpuOps
) -> None:
    pair = Pair(paths["qwen3_moe"], ops, strategy="hybrid", cache_slots=4)
    pair.prefill(0, 1)
    inner = pair.decoder
    for runner in pair.runners:
        decoder: Any = runner.decoder
        runner.decoder = AllLogits(decoder)
    for step in range(4):
        found, expected = (
            runner.step(Phase.DECODE, [(1, step), (0, 4)], padded_rows=1)[:2]
            for runner in pair.runners[::-1]
        )
        assert torch.equal(found, expected)
        pair.check_traces()
    assert isinstance(inner, GraphedDecoder)
    assert pair.graphs.replays == 3


class AllLogits:
    """Asks for the logits of padded rows too."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def forward(self, batch: Any, kv: KVCache) -> Tensor:
        every = torch.arange(len(batch.token_ids))
        logits: Tensor = self._decoder.forward(replace(batch, logit_rows=every), kv)
        return logits


@pytest.mark.parametrize("strategy", ["cpu", "hybrid"])
def test_without_a_handshake_for_graphs_steps_are_eager_and_it_is_said_once(
    strategy: str,
    paths: dict[str, Path],
    ops: CpuOps,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(TracedExecutor, "capturable", False)
    with caplog.at_level(logging.WARNING):
        pair = Pair(paths["qwen3_moe"], ops, strategy=strategy, cache_slots=4)
        pair.prefill(0)
        for step in range(4):
            pair.decode((0,), step)
    pair.check_traces()
    assert (pair.graphs.captures, pair.graphs.replays) == (0, 0)
    assert caplog.text.count("decode graphs are off") == len(caplog.records) == 1


def test_without_graphs_steps_are_guarded_all_the_same(paths: dict[str, Path], ops: CpuOps) -> None:
    pair = Pair(paths["qwen3_moe"], ops, with_graphs=False, strategy="hybrid", cache_slots=4)
    pair.prefill(0)
    pair.decode((0,))
    assert pair.executor is not None
    pair.executor.failures = ["layer 1: out of luck"]
    with pytest.raises(_native.HandshakeError, match="out of luck"):
        pair.graphed.decode([5])
    pair.decoder.close()


def test_another_cache_has_graphs_of_its_own(paths: dict[str, Path], ops: CpuOps) -> None:
    pair = Pair(paths["llama"], ops)
    pair.prefill(0)
    for step in range(3):
        pair.decode((0,), step)
    for runner in pair.runners:
        runner._kv = KVCache(layers=2, pages=200, page_tokens=3, kv_heads=1, head_dim=20)
        runner.fed = [0] * SEQUENCES
    pair.prefill(0)
    for step in range(3):
        pair.decode((0,), step)
    assert pair.graphs.captures == 2
    assert pair.graphs.open_graphs == 1
    pair.decoder.close()
    assert pair.graphs.open_graphs == 0


# Steps that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_before", [0, 1, 3], ids=["eager", "captured", "replayed"])
@pytest.mark.parametrize("strategy", ["cpu", "hybrid"])
def test_the_logits_of_a_step_that_failed_are_not_handed_out(
    strategy: str, steps_before: int, paths: dict[str, Path], ops: CpuOps
) -> None:
    pair = Pair(paths["qwen3_moe"], ops, strategy=strategy, cache_slots=7)
    pair.prefill(0)
    for step in range(steps_before):
        pair.decode((0,), step)
    assert pair.executor is not None
    pair.executor.failures = ["layer 1: out of luck"]
    with pytest.raises(_native.HandshakeError, match="layer 1: out of luck"):
        pair.graphed.decode([7])
    assert pair.executor.cleared == 1
    pair.plain.decode([7])
    for step in range(4):  # the engine would drop the request; the next one goes on
        pair.decode((0,), step)
    assert pair.graphs.captures == 1


def test_a_failed_prefill_is_not_handed_out(paths: dict[str, Path], ops: CpuOps) -> None:
    pair = Pair(paths["qwen3_moe"], ops, strategy="cpu")
    assert pair.executor is not None
    pair.executor.failures = ["layer 1: out of luck"]
    with pytest.raises(_native.HandshakeError, match="layer 1: out of luck"):
        pair.graphed.prefill(PROMPT)


def test_a_launch_that_fails_takes_its_announcement_back(
    paths: dict[str, Path], ops: CpuOps
) -> None:
    pair = Pair(paths["qwen3_moe"], ops, strategy="hybrid", cache_slots=4)
    pair.prefill(0)
    for step in range(3):
        pair.decode((0,), step)
    pair.graphs.replay_errors = [RuntimeError("the device is lost")]
    with pytest.raises(RuntimeError, match="the device is lost"):
        pair.graphed.decode([7])
    assert pair.executor is not None
    assert pair.executor.expected == 0


def test_the_step_after_a_failed_one_is_not_captured(
    paths: dict[str, Path], ops: CpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may tidy up after the failed one, which replays must not."""
    pair = Pair(paths["qwen3_moe"], ops, strategy="hybrid", cache_slots=4)
    pair.prefill(0, 1)
    pair.decode((0,))

    def fail(*arguments: Any) -> Tensor:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(CountedDecoder, "forward", fail)
        with pytest.raises(MemoryError):
            pair.graphed.step(Phase.DECODE, [(0, 3), (1, 3)])
    pair.graphed.fed = list(pair.plain.fed)
    pair.decode((0,))
    assert pair.graphs.captures == 0
    pair.decode((0,))
    assert pair.graphs.captures == 1
