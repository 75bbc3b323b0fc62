"""Submit and sync: exactly one sync per submit, nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freetoken.moe.cpu_executor import CpuMoeExecutor

ARGS = (torch.ones(1, 2), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))


class Work:
    def __init__(self, result: Tensor | Exception) -> None:
        self.result = result
        self.waits = 0

    def wait(self) -> Tensor:
        self.waits += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class Kernel:
    """Gives out `works` in order; without any left, submit fails."""

    def __init__(self, *works: Work, value: float = 0.0) -> None:
        self.works = list(works)
        self.value = value

    def __call__(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return hidden * self.value

    def submit(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Work:
        if not self.works:
            raise OSError("no worker")
        return self.works.pop(0)


def test_sync_returns_what_the_kernel_of_the_layer_computed() -> None:
    first, second = Work(torch.tensor([1.0])), Work(torch.tensor([2.0]))
    executor = CpuMoeExecutor([Kernel(first), Kernel(second)])
    pending = executor.decode_submit(1, *ARGS)
    assert (executor.pending, second.waits) == (1, 0)
    assert executor.decode_sync(pending).tolist() == [2.0]
    assert (executor.pending, second.waits, first.waits) == (0, 1, 0)


def test_decode_runs_the_layer_at_once() -> None:
    executor = CpuMoeExecutor([Kernel(value=2.0), Kernel(value=3.0)])
    assert executor.decode(1, *ARGS).tolist() == [[3.0, 3.0]]
    assert executor.pending == 0


def test_a_second_sync_is_an_error() -> None:
    executor = CpuMoeExecutor([Kernel(Work(torch.zeros(1)))])
    pending = executor.decode_submit(0, *ARGS)
    executor.decode_sync(pending)
    with pytest.raises(RuntimeError, match="synced exactly once"):
        executor.decode_sync(pending)


def test_work_of_another_executor_is_refused() -> None:
    one = CpuMoeExecutor([Kernel(Work(torch.zeros(1)))])
    other = CpuMoeExecutor([Kernel(Work(torch.zeros(1)))])
    pending = one.decode_submit(0, *ARGS)
    with pytest.raises(RuntimeError, match="not pending here"):
        other.decode_sync(pending)
    one.decode_sync(pending)


def test_failed_work_is_not_pending() -> None:
    executor = CpuMoeExecutor([Kernel(Work(OSError("poisoned")))])
    pending = executor.decode_submit(0, *ARGS)
    with pytest.raises(OSError, match="poisoned"):
        executor.decode_sync(pending)
    assert executor.pending == 0


def test_failed_submit_leaves_nothing_pending() -> None:
    executor = CpuMoeExecutor([Kernel()])
    with pytest.raises(OSError, match="no worker"):
        executor.decode_submit(0, *ARGS)
    assert executor.pending == 0


def test_close_waits_for_what_is_pending() -> None:
    works = [Work(torch.zeros(1)), Work(torch.zeros(1))]
    executor = CpuMoeExecutor([Kernel(*works)])
    executor.decode_submit(0, *ARGS)
    executor.decode_submit(0, *ARGS)
    executor.close()
    assert [work.waits for work in works] == [1, 1]
    assert executor.pending == 0
