"""GPU drivers and the choice of a handshake, over fake drivers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken import _native
from support.fake_gpu import (
    CALLBACK_NEVER_RUNS,
    DEVICE_RESET,
    OPERATION_FAILS,
    UNSUPPORTED,
    FakeGpu,
)

VENDORS = {"cuda": _native.Vendor.Cuda, "hip": _native.Vendor.Rocm}


def driver_of(gpu: FakeGpu) -> _native.GpuDriver:
    return _native.GpuDriver(VENDORS[gpu.vendor], gpu.path)


@pytest.fixture
def context() -> Iterator[_native.Context]:
    context = _native.Context(2)
    yield context
    context.close()


def test_the_best_mechanism_is_chosen(gpu: FakeGpu) -> None:
    driver = driver_of(gpu)
    assert driver.vendor == VENDORS[gpu.vendor]
    choice = driver.choose()
    assert choice.mechanism == _native.Mechanism.MemoryOperations and choice.capturable
    (finding,) = choice.findings
    assert (finding.eager, finding.graph, finding.reason) == (True, True, "")
    assert "memory" in finding.name


def test_the_next_one_is_chosen_with_the_reason(gpu: FakeGpu) -> None:
    driver = driver_of(gpu)
    gpu.set_faults(UNSUPPORTED)
    choice = driver.choose()
    assert "says that this device" in choice.findings[0].reason
    if gpu.vendor == "cuda":
        assert choice.mechanism == _native.Mechanism.HostCallbacks and choice.capturable
    else:
        assert choice.mechanism == _native.Mechanism.StreamSynchronization
        assert not choice.capturable
    gpu.set_faults(OPERATION_FAILS | CALLBACK_NEVER_RUNS)
    choice = driver.choose()
    assert choice.mechanism == _native.Mechanism.StreamSynchronization and not choice.capturable
    assert "FAKE_NOT_SUPPORTED" in choice.findings[0].reason


def test_one_mechanism_is_probed(gpu: FakeGpu) -> None:
    finding = driver_of(gpu).probe(_native.Mechanism.StreamSynchronization, layers=8, rounds=2)
    assert (finding.eager, finding.graph) == (True, False)
    assert finding.reason == "a graph cannot stop for its caller"


def test_a_lost_device_is_a_clear_error(gpu: FakeGpu) -> None:
    driver = driver_of(gpu)
    gpu.set_faults(DEVICE_RESET)
    with pytest.raises(_native.DriverError, match=r"the device was reset[\s\S]*stream sync"):
        driver.choose()


def test_a_missing_driver_is_named() -> None:
    with pytest.raises(_native.DriverError, match=r"cannot open .*/nowhere/libcuda\.so\.1"):
        _native.GpuDriver(_native.Vendor.Cuda, "/nowhere/libcuda.so.1")


def test_another_vendors_library_is_refused(fake_libraries: dict[str, Path]) -> None:
    with pytest.raises(_native.DriverError, match="has no hipInit"):
        _native.GpuDriver(_native.Vendor.Rocm, str(fake_libraries["cuda"]))


def test_unusable_limits_are_refused(gpu: FakeGpu, context: _native.Context) -> None:
    driver = driver_of(gpu)
    with pytest.raises(ValueError, match=r"time_limit_seconds: found 0\.0"):
        driver.choose(time_limit_seconds=0)
    with pytest.raises(ValueError, match="expected at least 1"):
        driver.choose(layers=0)
    with pytest.raises(ValueError, match="stall_limit_seconds: found nan"):
        _native.GpuHandshake(
            driver, context, _native.Mechanism.MemoryOperations, True, float("nan")
        )


@pytest.mark.parametrize("mechanism", list(_native.Mechanism))
def test_a_handshake_without_work_closes(
    gpu: FakeGpu, context: _native.Context, mechanism: _native.Mechanism
) -> None:
    handshake = _native.GpuHandshake(driver_of(gpu), context, mechanism, True)
    capturable = mechanism != _native.Mechanism.StreamSynchronization
    assert handshake.capturable == capturable and handshake.slots == 0
    with pytest.raises(_native.HandshakeError, match="found slot 0"):
        handshake.submit(0, gpu.current())
    handshake.check()
    handshake.close()
    handshake.close()
    with pytest.raises(_native.HandshakeError, match="closed"):
        handshake.wait(0, gpu.current())
