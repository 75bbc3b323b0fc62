"""CPU experts between the operations of a stream, over fake GPU drivers: the bits are those of the
same kernels called directly, eagerly and in graphs that are replayed with other inputs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken import _native
from freetoken.formats import Q4_0, Q8_0
from freetoken.kernels.cpu import CpuExpertKernel, CpuOps
from freetoken.moe.gpu_executor import GpuCpuMoeExecutor
from freetoken.moe.hybrid_decode import HybridDecodeExecutor, HybridDecodeRequest
from freetoken.moe.step_guard import DeviceGuard
from freetoken.moe.store import MappedExpertStore
from support.fake_gpu import FakeGpu
from support.moe_fakes import random_layer, random_routes

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 3, 6, 64, 32, 2
VENDORS = {"cuda": _native.Vendor.Cuda, "hip": _native.Vendor.Rocm}
MECHANISMS = list(_native.Mechanism)
CAPTURABLE = MECHANISMS[:2]


@pytest.fixture(scope="module")
def ops() -> Iterator[CpuOps]:
    ops = CpuOps(2)
    yield ops
    ops.close()


@pytest.fixture(scope="module")
def kernels(ops: CpuOps) -> list[CpuExpertKernel]:
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "formats": (Q8_0, Q4_0, Q8_0)}
    store = MappedExpertStore([random_layer(i, EXPERTS, **sizes) for i in range(LAYERS)])
    return [ops.expert_kernel(store.bank(i)) for i in range(LAYERS)]


def make_executor(
    gpu: FakeGpu,
    ops: CpuOps,
    kernels: list[CpuExpertKernel],
    mechanism: _native.Mechanism = _native.Mechanism.MemoryOperations,
    stall_limit_seconds: float = 30.0,
) -> GpuCpuMoeExecutor:
    driver = _native.GpuDriver(VENDORS[gpu.vendor], gpu.path)
    capturable = mechanism != _native.Mechanism.StreamSynchronization
    handshake = ops.handshake(driver, mechanism, capturable, stall_limit_seconds)
    return GpuCpuMoeExecutor(kernels, handshake, gpu)


@dataclass
class Inputs:
    hidden: Tensor
    weights: Tensor
    ids: Tensor

    @staticmethod
    def random(tokens: int, seed: int) -> Inputs:
        rng = np.random.default_rng(seed)
        hidden = torch.from_numpy(rng.normal(size=(tokens, HIDDEN)).astype(np.float32))
        weights, ids = random_routes(rng, tokens, EXPERTS, TOP_K)
        ids[rng.random(ids.shape) < 0.3] = -1
        return Inputs(hidden, weights, ids)

    def fill(self, other: Inputs) -> None:
        self.hidden.copy_(other.hidden)
        self.weights.copy_(other.weights)
        self.ids.copy_(other.ids)

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weights, self.ids


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_eager_steps_have_the_bits_of_the_kernels(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel], mechanism: _native.Mechanism
) -> None:
    executor = make_executor(gpu, ops, kernels, mechanism)
    for step in range(40):
        layer_id, tokens = step % LAYERS, (1, 3, 8)[step // 2 % 3]
        inputs = Inputs.random(tokens, step)
        pending = executor.decode_submit(layer_id, *inputs.all)
        assert executor.pending == 1
        result = executor.decode_sync(pending)
        gpu.synchronize()
        executor.check()
        assert executor.pending == 0
        assert result.dtype == torch.float64
        assert torch.equal(result, kernels[layer_id](*inputs.all))
    executor.close()


@pytest.mark.parametrize("mechanism", CAPTURABLE)
def test_replays_have_the_bits_of_the_kernels(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel], mechanism: _native.Mechanism
) -> None:
    """A step of all layers, whose results are kept apart; 200 replays, each with other inputs."""
    executor = make_executor(gpu, ops, kernels, mechanism)
    inputs = [Inputs.random(3, 1000 + i) for i in range(LAYERS)]
    results = [torch.zeros(3, HIDDEN, dtype=torch.float64) for _ in range(LAYERS)]

    def step() -> None:
        for layer_id in range(LAYERS):
            gpu.copy(results[layer_id], executor.decode(layer_id, *inputs[layer_id].all))

    step()  # pins its memory
    gpu.synchronize()
    gpu.begin_capture()
    step()
    graph = gpu.end_capture()
    pinned = gpu.pinned_calls
    for replay in range(200):
        for i in range(LAYERS):
            inputs[i].fill(Inputs.random(3, replay * LAYERS + i))
        executor.announce(LAYERS)
        graph.launch()
        gpu.synchronize()
        executor.check()
        for i in range(LAYERS):
            assert torch.equal(results[i], kernels[i](*inputs[i].all))
    assert gpu.pinned_calls == pinned
    graph.close()
    executor.close()


def test_memory_is_pinned_once_per_batch_size(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel]
) -> None:
    executor = make_executor(gpu, ops, kernels)
    small, large = Inputs.random(1, 0), Inputs.random(4, 1)
    addresses = set()
    for _ in range(3):
        for layer_id in range(LAYERS):
            addresses.add(executor.decode(layer_id, *small.all).data_ptr())
            addresses.add(executor.decode(layer_id, *large.all).data_ptr())
    assert gpu.pinned_calls == 8 and len(addresses) == 2
    gpu.synchronize()
    executor.close()


def test_two_works_pending_at_once_do_not_share_memory(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel]
) -> None:
    executor = make_executor(gpu, ops, kernels)
    for seed in range(5):
        one, other = Inputs.random(2, seed), Inputs.random(2, 50 + seed)
        first = executor.decode_submit(0, *one.all)
        second = executor.decode_submit(0, *other.all)
        result_of_second = executor.decode_sync(second)
        result_of_first = executor.decode_sync(first)
        gpu.synchronize()
        assert torch.equal(result_of_first, kernels[0](*one.all))
        assert torch.equal(result_of_second, kernels[0](*other.all))
    executor.check()
    executor.close()


def test_a_first_step_cannot_be_captured(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel]
) -> None:
    executor = make_executor(gpu, ops, kernels)
    inputs = Inputs.random(2, 0)
    gpu.begin_capture()
    with pytest.raises(RuntimeError, match="run one eager step of this batch size"):
        executor.decode_submit(0, *inputs.all)
    assert executor.pending == 0
    gpu.end_capture().close()
    executor.decode(0, *inputs.all)
    gpu.synchronize()
    gpu.begin_capture()
    executor.decode(0, *inputs.all)
    with pytest.raises(RuntimeError, match="run one eager step of this batch size"):
        executor.decode(1, *inputs.all)  # a layer that never met this batch size
    gpu.end_capture().close()
    executor.close()


def test_without_capture_the_mechanism_says_so(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel]
) -> None:
    executor = make_executor(gpu, ops, kernels, _native.Mechanism.StreamSynchronization)
    inputs = Inputs.random(2, 0)
    executor.decode(0, *inputs.all)
    gpu.begin_capture()
    with pytest.raises(_native.HandshakeError, match="run this step eagerly"):
        executor.decode_submit(0, *inputs.all)
    assert executor.pending == 0
    gpu.end_capture().close()
    executor.close()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_failed_job_raises_and_gives_no_result(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel], mechanism: _native.Mechanism
) -> None:
    executor = make_executor(gpu, ops, kernels, mechanism)
    inputs = Inputs.random(2, 3)
    wrong = Inputs(inputs.hidden, inputs.weights, torch.full_like(inputs.ids, EXPERTS))
    pending = executor.decode_submit(1, *wrong.all)
    failure = r"layer 1, 2 tokens: ids: found 6 at position 0"
    if mechanism == _native.Mechanism.StreamSynchronization:
        with pytest.raises(_native.HandshakeError, match=failure):
            executor.decode_sync(pending)
    else:
        result = executor.decode_sync(pending)
        gpu.synchronize()
        assert result.isnan().all()
    with pytest.raises(_native.HandshakeError, match=failure):
        executor.check()
    with pytest.raises(_native.HandshakeError, match=failure):
        executor.decode_submit(0, *inputs.all)
    assert executor.pending == 0
    executor.clear()
    result = executor.decode(0, *inputs.all)
    gpu.synchronize()
    executor.check()
    assert torch.equal(result, kernels[0](*inputs.all))
    executor.close()


def test_replays_that_never_come_are_an_error(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel]
) -> None:
    executor = make_executor(gpu, ops, kernels, stall_limit_seconds=0.2)
    executor.announce(5)
    end = time.monotonic() + 20
    with pytest.raises(_native.HandshakeError, match="though 5 handshakes were submitted"):
        while time.monotonic() < end:
            executor.check()
            time.sleep(0.01)
    executor.close()


def test_a_guard_raises_for_a_step_that_failed_and_lets_the_next_one_try(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel]
) -> None:
    executor = make_executor(gpu, ops, kernels)
    guard = DeviceGuard(gpu.synchronize, executor)
    inputs = Inputs.random(2, 3)
    wrong = Inputs(inputs.hidden, inputs.weights, torch.full_like(inputs.ids, EXPERTS))
    for _ in range(2):
        executor.decode(1, *wrong.all)
        with pytest.raises(_native.HandshakeError, match=r"layer 1, 2 tokens: ids: found 6"):
            guard.after_step()
        result = executor.decode(0, *inputs.all)
        guard.after_step()
        assert torch.equal(result, kernels[0](*inputs.all))
    assert guard.handshakes == 4
    executor.close()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_guard_knows_what_can_be_captured_and_counts_it(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel], mechanism: _native.Mechanism
) -> None:
    executor = make_executor(gpu, ops, kernels, mechanism)
    guard = DeviceGuard(gpu.synchronize, executor)
    assert guard.capturable == (mechanism in CAPTURABLE)
    inputs = Inputs.random(1, 3)
    for layer_id in range(LAYERS):
        executor.decode(layer_id, *inputs.all)
    guard.after_step()
    if guard.capturable:
        before = guard.handshakes
        gpu.begin_capture()
        for layer_id in range(LAYERS):
            result = executor.decode(layer_id, *inputs.all)
        graph = gpu.end_capture()
        captured = guard.handshakes - before
        assert captured == LAYERS
        with guard.replaying(captured):
            graph.launch()
        guard.after_step()
        assert torch.equal(result, kernels[LAYERS - 1](*inputs.all))
        graph.close()
    executor.close()


def test_a_guard_takes_back_what_was_not_launched(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel]
) -> None:
    executor = make_executor(gpu, ops, kernels, stall_limit_seconds=0.2)
    guard = DeviceGuard(gpu.synchronize, executor)
    with pytest.raises(MemoryError), guard.replaying(3):
        raise MemoryError
    time.sleep(0.6)
    guard.after_step()
    with guard.replaying(3):
        pass  # launched, and never there
    end = time.monotonic() + 20
    with pytest.raises(_native.HandshakeError, match="though 3 handshakes were submitted"):
        while time.monotonic() < end:
            guard.after_step()
            time.sleep(0.01)
    executor.close()


def test_work_is_synced_exactly_once_by_its_executor(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel]
) -> None:
    one, other = (make_executor(gpu, ops, kernels) for _ in range(2))
    inputs = Inputs.random(1, 0)
    pending = one.decode_submit(0, *inputs.all)
    with pytest.raises(RuntimeError, match="not pending here"):
        other.decode_sync(pending)
    one.decode_sync(pending)
    with pytest.raises(RuntimeError, match="synced exactly once"):
        one.decode_sync(pending)
    one.close()
    other.close()


def test_close_waits_for_what_is_pending(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel]
) -> None:
    executor = make_executor(gpu, ops, kernels)
    inputs = Inputs.random(8, 0)
    executor.decode_submit(0, *inputs.all)
    executor.decode_submit(1, *inputs.all)
    executor.close()
    assert executor.pending == 0


def test_wrong_shapes_leave_nothing_pending(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel]
) -> None:
    executor = make_executor(gpu, ops, kernels)
    hidden = torch.zeros(1, HIDDEN + 32)
    with pytest.raises(ValueError, match=r"x: found shape \[1, 96\], expected \[any, 64\]"):
        executor.decode_submit(0, hidden, torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32))
    assert executor.pending == 0
    executor.close()


class Synchronised:
    """The executor for CPU tensors that the caller reads at once, not in the stream's order."""

    def __init__(self, executor: GpuCpuMoeExecutor, gpu: FakeGpu) -> None:
        self._executor = executor
        self._gpu = gpu
        self.decode_submit = executor.decode_submit

    def decode_sync(self, pending: object) -> Tensor:
        result = self._executor.decode_sync(pending)  # type: ignore[arg-type]
        self._gpu.synchronize()
        self._executor.check()
        return result


class SomeOnGpu:
    """A cache that has the even experts, expert e in slot e."""

    def ensure_experts_hybrid(self, layer_id: int, topk_ids: Tensor) -> None:
        topk_ids.masked_fill_(topk_ids % 2 != 0, -1)

    def record_stats(self, layer_id: int) -> None:
        pass

    def copy_missing(self) -> None:
        pass


@pytest.mark.parametrize("overlap", [True, False])
def test_a_hybrid_step_has_the_bits_of_one_call(
    gpu: FakeGpu, ops: CpuOps, kernels: list[CpuExpertKernel], overlap: bool
) -> None:
    executor = make_executor(gpu, ops, kernels)
    hybrid = HybridDecodeExecutor(SomeOnGpu(), Synchronised(executor, gpu), overlap=overlap)
    for step in range(12):
        layer_id, inputs = step % LAYERS, Inputs.random(1 + step % 3, step)
        expected = kernels[layer_id](*inputs.all)
        request = HybridDecodeRequest(layer_id, inputs.hidden, inputs.weights, inputs.ids.clone())
        assert torch.equal(hybrid.decode(request, kernels[layer_id]), expected)
    executor.close()
