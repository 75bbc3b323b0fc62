"""Captures of torch on a real device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freetoken.platforms.graphs import TorchGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture
def graphs() -> TorchGraphs:
    return TorchGraphs(torch.device("cuda", torch.cuda.current_device()))


def test_a_replay_takes_its_inputs_from_pinned_memory(graphs: TorchGraphs) -> None:
    pinned = graphs.pinned((64,), torch.uint8)
    numbers = pinned.view(torch.int64)
    standing = torch.zeros_like(pinned, device="cuda")

    def work() -> Tensor:
        standing.copy_(pinned, non_blocking=True)
        return standing.view(torch.int64) * 3 + 1

    work()
    small = graphs.capture(work)
    large = graphs.capture(lambda: work().repeat(1000))
    graphs.synchronize()
    for step in range(20):
        numbers.copy_(torch.arange(8) * step)
        graph = large if step % 3 == 0 else small
        found = graph.replay()[:8]
        graphs.synchronize()
        assert found.tolist() == [3 * step * i + 1 for i in range(8)]
    small.close()
    large.close()


def test_a_capture_that_fails_changes_nothing(graphs: TorchGraphs) -> None:
    values = torch.ones(4, device="cuda")
    stream = torch.cuda.current_stream()

    def reads() -> Tensor:
        values.mul_(2)
        return values * float(values.sum())

    def fails() -> Tensor:
        values.mul_(2)
        raise MemoryError("no room")

    with pytest.raises(RuntimeError, match="captur"):
        graphs.capture(reads)
    with pytest.raises(MemoryError, match="no room"):
        graphs.capture(fails)
    assert torch.cuda.current_stream() == stream
    assert values.tolist() == [1.0] * 4
    graph = graphs.capture(lambda: values * 5)
    assert graph.replay().tolist() == [5.0] * 4
    graph.close()
