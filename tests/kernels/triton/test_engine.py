"""The whole engine on a GPU platform: Triton's kernels, the fake driver's handshakes, the device's
cache. Under the interpreter, tensors of the CPU stand for the GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freetoken import LLM, SamplingParams
from freetoken.engine import loading
from freetoken.kernels.triton import linear
from freetoken.kernels.triton.ops import TritonOps
from freetoken.platforms import CpuPlatform
from freetoken.platforms.gpu import GpuPlatform
from freetoken.platforms.graphs import Graph
from support.fake_gpu import UNSUPPORTED, FakeGpu
from support.tiny_models import make_model, save_byte_tokenizer, save_hf, tiny_config

PROMPTS = [[3, 17, 99, 0, 42, 42], [100, 1]]
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 32}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class InOrder(FakeGpu):
    """Torch's work on CPU tensors is done when it returns, and so must be what it reads."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        super().copy(target, source)
        self.synchronize()


class RefusesToCapture:
    """What is captured here would run in the driver, but torch's work would not."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def capture(self, work: Callable[[], Tensor]) -> Graph:
        raise RuntimeError("graphs are not for CPU tensors")

    def synchronize(self) -> None:
        """Torch's work on CPU tensors is done when it returns."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = save_hf(make_model(tiny_config("qwen3_moe", **SMALL), seed=5), tmp_path)
    save_byte_tokenizer(path)
    return path


@pytest.fixture
def fake(fake_libraries: dict[str, Path]) -> Iterator[InOrder]:
    made = InOrder("cuda", fake_libraries["cuda"])
    yield made
    made.close()


@pytest.fixture
def platforms(fake: InOrder, monkeypatch: pytest.MonkeyPatch) -> list[GpuPlatform]:
    """Those that models are loaded onto from now on."""
    made: list[GpuPlatform] = []

    def select(_device: str, threads: int | None, activations: str) -> GpuPlatform:
        platform = GpuPlatform(
            torch.device("cpu"),
            threads,
            activations,
            driver_library=fake.path,
            streams=fake,
            graphs=RefusesToCapture(),
        )
        made.append(platform)
        return platform

    monkeypatch.setattr(loading, "select_platform", select)
    monkeypatch.setattr(linear, "_PROGRAMS", 8)  # the interpreter takes long per program
    return made


def tokens(path: Path, **options: object) -> list[tuple[int, ...]]:
    with LLM(path, cpu_activations="exact", **options) as llm:  # type: ignore[arg-type]
        return [tuple(c.token_ids) for c in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fake driver knows no GPU's memory")
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fused"},
        {"strategy": "cpu"},
        {"strategy": "offload", "cache_slots": 3},
        {"strategy": "hybrid", "cache_slots": 2, "max_fetch": 1},
    ],
    ids=lambda options: str(options["strategy"]),
)
def test_every_strategy_gives_the_cpus_tokens(
    options: dict[str, object], model: Path, platforms: list[GpuPlatform]
) -> None:
    found = tokens(model, **options)
    assert len(platforms) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "select_platform", lambda *_: CpuPlatform(None, "exact"))
        assert found == tokens(model, strategy="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fake driver knows no GPU's memory")
def test_a_driver_without_memory_operations_is_served_by_the_next_mechanism(
    model: Path, platforms: list[GpuPlatform], fake: FakeGpu
) -> None:
    fake.set_faults(UNSUPPORTED)
    found = tokens(model, strategy="hybrid", cache_slots=2, max_fetch=1)
    (platform,) = platforms
    assert "callback" in platform.handshake_choice.mechanism.name.lower()
    fake.set_faults(0)
    assert found == tokens(model, strategy="hybrid", cache_slots=2, max_fetch=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fake driver knows no GPU's memory")
@pytest.mark.parametrize("strategy", ["offload", "hybrid"])
def test_a_decode_step_with_a_wrong_expert_id_gives_no_token(
    strategy: str, model: Path, platforms: list[GpuPlatform], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache's kernels can but mark it, and compute nothing for the layer."""
    route = TritonOps.route_topk

    def wrong(self: TritonOps, logits: Tensor, *arguments: Any, **options: Any) -> Any:
        weights, ids = route(self, logits, *arguments, **options)
        if len(logits) == 1:  # a decode step of the one sequence
            ids[0, 0] = 1000
        return weights, ids

    monkeypatch.setattr(TritonOps, "route_topk", wrong)
    with (
        LLM(model, strategy=strategy, cache_slots=3, cpu_activations="exact") as llm,
        pytest.raises(ValueError, match="MoE layer 0: an expert id is out of range"),
    ):
        llm.generate(PROMPTS[:1], GREEDY)
