"""The hybrid step's contract, with recording fakes: order, masks, rewriting, failures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freetoken.moe.hybrid_decode import HybridDecodeExecutor, HybridDecodeRequest
from support.host_reads import HostReads


class Recorder:
    """A cache, a CPU executor and a GPU callback that write down what is asked of them.

    The experts of the fakes are linear, expert e of x is (e + 1) * x, so results can be checked.
    `raise_in` names the call that fails.
    """

    def __init__(self, slots: dict[int, int], raise_in: str = "") -> None:
        self.slots = slots
        self.raise_in = raise_in
        self.events: list[str] = []
        self.cpu_calls: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self.gpu_calls: list[tuple[Tensor, Tensor, Tensor]] = []
        self.pending: set[int] = set()

    def _note(self, event: str) -> None:
        self.events.append(event)
        if event == self.raise_in:
            raise OSError(f"{event} failed")

    def ensure_experts_hybrid(self, layer_id: int, topk_ids: Tensor) -> None:
        self._note("ensure")
        topk_ids.copy_(
            torch.tensor([[self.slots.get(e, -1) for e in row] for row in topk_ids.tolist()])
        )

    def record_stats(self, layer_id: int) -> None:
        self._note("stats")

    def copy_missing(self) -> None:
        self._note("copy")

    def decode_submit(self, layer_id: int, hidden: Tensor, weights: Tensor, ids: Tensor) -> int:
        self._note("submit")
        self.cpu_calls.append((layer_id, hidden, weights.clone(), ids.clone()))
        self.pending.add(len(self.cpu_calls) - 1)
        return len(self.cpu_calls) - 1

    def decode_sync(self, pending: int) -> Tensor:
        self.pending.remove(pending)  # fails on a second sync
        self._note("sync")
        _, hidden, weights, ids = self.cpu_calls[pending]
        return ((ids + 1) * (ids >= 0) * weights).sum(1, keepdim=True) * hidden

    def gpu(self, hidden: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        self._note("gpu")
        self.gpu_calls.append((hidden, weights.clone(), slots.clone()))
        expert_in = {slot: expert for expert, slot in self.slots.items()}
        experts = torch.tensor([[expert_in.get(s, 10**6) for s in row] for row in slots.tolist()])
        return ((experts + 1) * weights).sum(1, keepdim=True) * hidden


def request(
    ids: list[list[int]], weights: list[list[float]], layer_id: int = 0
) -> HybridDecodeRequest:
    hidden = torch.arange(1.0, 1.0 + 2 * len(ids)).reshape(len(ids), 2)
    return HybridDecodeRequest(
        layer_id, hidden, torch.tensor(weights), torch.tensor(ids, dtype=torch.int32)
    )


def executor(fake: Recorder, *, overlap: bool = True) -> HybridDecodeExecutor[int]:
    return HybridDecodeExecutor(fake, fake, overlap=overlap)


def test_overlapped_order() -> None:
    fake = Recorder({11: 3})
    executor(fake).decode(request([[11, 42]], [[0.7, 0.3]]), fake.gpu)
    assert fake.events == ["ensure", "stats", "submit", "copy", "gpu", "sync"]


def test_serialised_order() -> None:
    fake = Recorder({11: 3})
    executor(fake, overlap=False).decode(request([[11, 42]], [[0.7, 0.3]]), fake.gpu)
    assert fake.events == ["ensure", "stats", "submit", "sync", "copy", "gpu"]


def test_stats_only_if_asked() -> None:
    fake = Recorder({})
    silent = HybridDecodeExecutor(fake, fake, record_stats=False)
    silent.decode(request([[1]], [[1.0]]), fake.gpu)
    assert "stats" not in fake.events


@pytest.mark.parametrize("overlap", [True, False])
def test_the_example_of_the_design(overlap: bool) -> None:
    fake = Recorder({11: 3})
    step = request([[11, 42]], [[0.7, 0.3]], layer_id=5)
    result = executor(fake, overlap=overlap).decode(step, fake.gpu)

    assert step.topk_ids.tolist() == [[3, -1]]  # rewritten in place
    ((layer_id, cpu_hidden, cpu_weights, cpu_ids),) = fake.cpu_calls
    assert layer_id == 5
    assert cpu_hidden is step.hidden_states
    assert cpu_ids.dtype == torch.int32
    assert cpu_ids.tolist() == [[-1, 42]]
    assert torch.equal(cpu_weights, torch.tensor([[0.7, 0.3]]))
    ((gpu_hidden, gpu_weights, gpu_slots),) = fake.gpu_calls
    assert gpu_hidden is step.hidden_states
    assert gpu_slots.dtype == torch.int32
    assert gpu_slots.tolist() == [[3, 0]]
    assert torch.equal(gpu_weights, torch.tensor([[0.7, 0.0]]))
    torch.testing.assert_close(result, (0.7 * 12 + 0.3 * 43) * step.hidden_states)
    assert torch.equal(step.topk_weights, torch.tensor([[0.7, 0.3]]))  # not rewritten


def test_an_all_gpu_step_still_submits_and_waits() -> None:
    fake = Recorder({1: 0, 2: 1})
    executor(fake).decode(request([[1, 2]], [[0.5, 0.5]]), fake.gpu)
    assert fake.events == ["ensure", "stats", "submit", "copy", "gpu", "sync"]
    assert fake.cpu_calls[0][3].tolist() == [[-1, -1]]


def test_an_all_cpu_step_still_runs_the_gpu_side() -> None:
    fake = Recorder({})
    executor(fake).decode(request([[1, 2]], [[0.5, 0.5]]), fake.gpu)
    assert fake.events == ["ensure", "stats", "submit", "copy", "gpu", "sync"]
    _, weights, slots = fake.gpu_calls[0]
    assert weights.tolist() == [[0.0, 0.0]]
    assert slots.tolist() == [[0, 0]]


def test_padded_rows_run_nowhere() -> None:
    fake = Recorder({1: 0})
    result = executor(fake).decode(request([[1, 4], [-1, -1]], [[0.5, 0.5], [0, 0]]), fake.gpu)
    assert fake.cpu_calls[0][3].tolist() == [[-1, 4], [-1, -1]]
    assert fake.gpu_calls[0][1].tolist() == [[0.5, 0.0], [0.0, 0.0]]
    assert result[1].tolist() == [0.0, 0.0]


@settings(deadline=None)
@given(
    ids=st.integers(1, 4).flatmap(
        lambda k: st.lists(
            st.lists(st.integers(-1, 9), min_size=k, max_size=k), min_size=1, max_size=5
        )
    ),
    resident=st.dictionaries(st.integers(0, 9), st.integers(0, 5)),
    overlap=st.booleans(),
)
def test_every_route_is_computed_exactly_once(
    ids: list[list[int]], resident: dict[int, int], overlap: bool
) -> None:
    fake = Recorder(resident)
    weights = [[0.1 * (j + 1) if e >= 0 else 0.0 for j, e in enumerate(row)] for row in ids]
    executor(fake, overlap=overlap).decode(request(ids, weights), fake.gpu)
    cpu_ids, (_, gpu_weights, gpu_slots) = fake.cpu_calls[0][3], fake.gpu_calls[0]
    for t, row in enumerate(ids):
        for k, expert in enumerate(row):
            on_cpu = int(cpu_ids[t, k]) >= 0
            on_gpu = float(gpu_weights[t, k]) != 0
            assert on_cpu + on_gpu == (expert >= 0)
            assert not on_cpu or int(cpu_ids[t, k]) == expert
            assert not on_gpu or int(gpu_slots[t, k]) == resident[expert]
            assert int(gpu_slots[t, k]) >= 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("failing", ["ensure", "stats", "submit", "copy", "gpu", "sync"])
def test_nothing_stays_pending_when_a_step_fails(failing: str, overlap: bool) -> None:
    fake = Recorder({11: 3}, raise_in=failing)
    with pytest.raises(OSError, match=f"{failing} failed"):
        executor(fake, overlap=overlap).decode(request([[11, 42]], [[0.7, 0.3]]), fake.gpu)
    assert not fake.pending
    assert ("submit" in fake.events and failing != "submit") == ("sync" in fake.events)


def test_when_both_sides_fail_both_errors_are_told() -> None:
    fake = Recorder({11: 3}, raise_in="sync")

    def gpu(hidden: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        raise ValueError("kernel failed")

    with pytest.raises(OSError, match="sync failed") as caught:
        executor(fake).decode(request([[11, 42]], [[0.7, 0.3]]), gpu)
    assert isinstance(caught.value.__context__, ValueError)
    assert not fake.pending


class Blind:
    """Parts that look at no value, as on a GPU."""

    def ensure_experts_hybrid(self, layer_id: int, topk_ids: Tensor) -> None:
        topk_ids.sub_(1)

    def record_stats(self, layer_id: int) -> None: ...

    def copy_missing(self) -> None: ...

    def decode_submit(self, layer_id: int, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return hidden * (ids * weights).sum(1, keepdim=True)

    def decode_sync(self, pending: Tensor) -> Tensor:
        return pending


def test_no_device_value_is_read_on_the_host() -> None:
    step = request([[0, 1], [2, 3]], [[0.5, 0.5], [0.5, 0.5]])
    with HostReads():
        HybridDecodeExecutor(Blind(), Blind()).decode(step, lambda h, w, s: h * (w * s).sum())
    with pytest.raises(AssertionError, match="reads a device value"), HostReads():
        step.topk_ids.tolist()
