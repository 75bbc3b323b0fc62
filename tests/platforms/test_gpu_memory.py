"""Memory for a GPU, with a driver that only takes notes; and on a real one where there is one."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from freetoken.errors import CapacityError, FreeTokenError
from freetoken.platforms import gpu_memory


class Driver:
    """`register` says what cudaHostRegister returns."""

    def __init__(self, register: int = 0) -> None:
        self.register = register
        self.events: list[object] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.events.append(("register", address, size_bytes, flags))
        return self.register

    def cudaGetErrorString(self, code: int) -> str:
        return f"text of {code}"

    def cudaHostUnregister(self, address: int) -> int:
        self.events.append(("unregister", address))
        return 0


class Owner(np.ndarray):
    """Memory whose end can be seen."""


def test_memory_stays_registered_for_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory = np.zeros(1024, np.uint8).view(Owner)
    weakref.finalize(memory, driver.events.append, "freed")
    records = torch.from_numpy(memory).view(4, 256)
    address = records.data_ptr()
    del memory
    assert gpu_memory.pin(records.view(-1))
    gc.collect()
    assert driver.events == [("register", address, 1024, 2)]
    part = records[1]
    del records
    gc.collect()
    assert len(driver.events) == 1  # a view keeps it
    del part
    gc.collect()
    assert driver.events[1:] == [("unregister", address), "freed"]  # in this order


def refuse(
    monkeypatch: pytest.MonkeyPatch, code: int, next_call: str
) -> tuple[Driver, torch.Tensor]:
    """A driver that answers with that code, and memory to pin; what the next call raises."""

    def reports_late(*_: object, **__: object) -> None:
        driver.events.append("next call")
        raise RuntimeError(next_call)

    driver = Driver(register=code)
    records = torch.zeros(512, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch, "zeros", reports_late)
    return driver, records


@pytest.mark.parametrize("code", [1, 2, 712, 801])
def test_a_refused_pin_is_a_normal_case(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    driver, records = refuse(monkeypatch, code, f"CUDA error: text of {code}\nand advice")
    assert not gpu_memory.pin(records)
    assert driver.events[1:] == ["next call"]  # so that nobody else meets the error
    del records
    gc.collect()
    assert len(driver.events) == 2  # nothing to take back


def test_an_answer_that_is_no_refusal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, records = refuse(monkeypatch, 700, "not reached")
    with pytest.raises(FreeTokenError, match=r"answered 700 \(text of 700\) .*ft doctor"):
        gpu_memory.pin(records)
    assert len(driver.events) == 1


def test_another_error_after_a_refusal_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, records = refuse(monkeypatch, 2, "CUDA error: an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        gpu_memory.pin(records)


def test_too_little_device_memory_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(CapacityError, match=r"3.0 GiB of memory on cuda:0 .*--cache-slots"):
        gpu_memory.allocate_slots(3 << 30, torch.device("cuda:0"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_reads_pinned_memory_where_it_lies() -> None:
    records = torch.from_numpy(np.arange(1 << 20, dtype=np.uint32).view(np.uint8))
    assert gpu_memory.pin(records)
    assert records.is_pinned()
    slots = gpu_memory.allocate_slots(records.nbytes, torch.device("cuda"))
    assert not slots.any()
    slots.copy_(records, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(slots.cpu(), records)
