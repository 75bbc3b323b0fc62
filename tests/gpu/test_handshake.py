"""Handshakes over the real driver: what the probes find, the CPU's bits in eager and captured
steps by every mechanism that works, and errors in place of hangs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from gpu_device import CudaDevice
from torch import Tensor

from freetoken import _native
from freetoken.formats import BF16
from freetoken.kernels.cpu import CpuExpertKernel, CpuOps
from freetoken.moe.gpu_executor import GpuCpuMoeExecutor
from freetoken.moe.store import MappedExpertStore
from freetoken.platforms.gpu import GpuPlatform
from freetoken.platforms.graphs import Graph
from support.expert_layers import random_layer
from support.gpu_rig import EXPERTS, Inputs, model_layers, needs_driver, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu, needs_driver]

LAYERS = model_layers()
MECHANISMS = list(_native.Mechanism)
STALL_SECONDS = 0.05
BACK_WITHIN_SECONDS = 20.0


@pytest.fixture(scope="module")
def findings(platform: GpuPlatform) -> dict[_native.Mechanism, _native.HandshakeFinding]:
    found = {mechanism: platform.driver.probe(mechanism) for mechanism in MECHANISMS}
    for finding in found.values():
        print(f"{finding.name}: eager {finding.eager}, graph {finding.graph}; {finding.reason}")
    return found


@pytest.fixture(scope="module")
def kernels(platform: GpuPlatform) -> list[CpuExpertKernel]:
    store = MappedExpertStore(LAYERS)
    return [platform.cpu_ops.expert_kernel(store.bank(i)) for i in range(len(LAYERS))]


def make_executor(
    platform: GpuPlatform,
    ops: CpuOps,
    kernels: list[CpuExpertKernel],
    finding: _native.HandshakeFinding,
    stall_limit_seconds: float = 30.0,
) -> GpuCpuMoeExecutor:
    handshake = ops.handshake(
        platform.driver, finding.mechanism, finding.graph, stall_limit_seconds
    )
    return GpuCpuMoeExecutor(kernels, handshake, platform.streams)


def test_a_mechanism_works_in_graphs(
    findings: dict[_native.Mechanism, _native.HandshakeFinding], platform: GpuPlatform
) -> None:
    plain = findings[_native.Mechanism.StreamSynchronization]
    assert plain.eager and not plain.graph
    reasons = {finding.name: finding.reason for finding in findings.values()}
    assert any(finding.graph for finding in findings.values()), reasons
    assert platform.handshake_choice.capturable
    assert findings[platform.handshake_choice.mechanism].graph


def test_cuda_has_memory_operations(
    findings: dict[_native.Mechanism, _native.HandshakeFinding],
) -> None:
    if torch.version.hip:
        pytest.skip("ROCm's depend on its version; a probe decides")
    finding = findings[_native.Mechanism.MemoryOperations]
    assert finding.eager and finding.graph, finding.reason


def test_a_probe_of_a_long_graph(platform: GpuPlatform) -> None:
    """As long as a decode step of many layers, again and again."""
    mechanism = platform.handshake_choice.mechanism
    finding = platform.driver.probe(mechanism, layers=200, rounds=20, time_limit_seconds=30.0)
    assert finding.eager and finding.graph, finding.reason


class Step:
    """All layers' CPU experts, one after the other, on standing tensors of the device."""

    def __init__(self, executor: GpuCpuMoeExecutor, tokens: int) -> None:
        first = Inputs.random(tokens, seed=0)
        self._executor = executor
        self._standing = [x.cuda() for x in (first.hidden, first.weights, first.ids)]
        self.results = torch.zeros(*first.hidden.shape, dtype=torch.float64, device="cuda")

    def fill(self, inputs: Inputs) -> None:
        new = inputs.hidden, inputs.weights, inputs.ids
        for standing, values in zip(self._standing, new, strict=True):
            standing.copy_(values)
        self.results.fill_(float("nan"))

    def __call__(self) -> None:
        hidden, weights, ids = self._standing
        for i in range(len(LAYERS)):
            self.results[i].copy_(self._executor.decode(i, hidden[i], weights[i], ids[i]))


def expected(kernels: list[CpuExpertKernel], inputs: Inputs) -> Tensor:
    parts = zip(inputs.hidden, inputs.weights, inputs.ids, strict=True)
    return torch.stack([kernel(*part) for kernel, part in zip(kernels, parts, strict=True)])


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_steps_have_the_bits_of_the_kernels(
    mechanism: _native.Mechanism,
    captured: bool,
    findings: dict[_native.Mechanism, _native.HandshakeFinding],
    kernels: list[CpuExpertKernel],
    platform: GpuPlatform,
) -> None:
    finding = findings[mechanism]
    if not (finding.graph if captured else finding.eager):
        pytest.skip(f"{finding.name} does not work here: {finding.reason}")
    executor = make_executor(platform, platform.cpu_ops, kernels, finding)
    step = Step(executor, 2)
    step()
    torch.cuda.synchronize()
    graph: Graph | None = CudaDevice().capture(step) if captured else None
    try:
        for seed in range(200):
            inputs = Inputs.random(2, seed, padded=seed % 2 == 0)
            step.fill(inputs)
            if graph is None:
                step()
            else:
                executor.announce(len(LAYERS))
                graph.replay()
            torch.cuda.synchronize()
            executor.check()
            assert torch.equal(step.results.cpu(), expected(kernels, inputs))
    finally:
        torch.cuda.synchronize()
        if graph is not None:
            graph.close()
        executor.close()


def test_a_failed_job_raises_and_the_next_step_is_right(
    findings: dict[_native.Mechanism, _native.HandshakeFinding],
    kernels: list[CpuExpertKernel],
    platform: GpuPlatform,
) -> None:
    executor = make_executor(
        platform, platform.cpu_ops, kernels, findings[platform.handshake_choice.mechanism]
    )
    step, inputs = Step(executor, 2), Inputs.random(2, seed=1)
    wrong = Inputs(inputs.hidden, inputs.weights, torch.full_like(inputs.ids, EXPERTS))
    step.fill(wrong)
    step()
    torch.cuda.synchronize()
    assert step.results.isnan().all()
    with pytest.raises(_native.HandshakeError, match=f"found {EXPERTS}"):
        executor.check()
    executor.clear()
    step.fill(inputs)
    step()
    torch.cuda.synchronize()
    executor.check()
    assert torch.equal(step.results.cpu(), expected(kernels, inputs))
    executor.close()


@pytest.fixture
def slow() -> Iterator[tuple[CpuOps, list[CpuExpertKernel], tuple[Tensor, Tensor, Tensor]]]:
    """One thread, and a job that takes it several times the stall limit at the least."""
    ops = CpuOps(1, activations="exact")
    size, tokens, top_k = 1024, 2048, 4
    layer = random_layer(0, BF16, hidden=size, inner=size, experts=top_k)
    kernel = ops.expert_kernel(MappedExpertStore([layer]).bank(0))
    hidden = torch.randn(tokens, size, device="cuda")
    weights = torch.ones(tokens, top_k, device="cuda")
    ids = torch.arange(top_k, dtype=torch.int32, device="cuda").repeat(tokens, 1)
    start = time.monotonic()
    kernel(hidden.cpu(), weights.cpu(), ids.cpu())
    assert time.monotonic() - start > 4 * STALL_SECONDS, "the job is too quick for this test"
    yield ops, [kernel], (hidden, weights, ids)
    ops.close()


def error_after(executor: GpuCpuMoeExecutor, launch: Callable[[], None], reason: str) -> None:
    """The stream goes on, and the error says why."""
    start = time.monotonic()
    launch()
    torch.cuda.synchronize()
    assert time.monotonic() - start < BACK_WITHIN_SECONDS
    with pytest.raises(_native.HandshakeError, match=reason):
        executor.check()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_hung_job_is_an_error_and_no_hang(
    captured: bool,
    slow: tuple[CpuOps, list[CpuExpertKernel], tuple[Tensor, Tensor, Tensor]],
    findings: dict[_native.Mechanism, _native.HandshakeFinding],
    platform: GpuPlatform,
) -> None:
    ops, kernels, inputs = slow
    finding = findings[platform.handshake_choice.mechanism]
    executor = make_executor(platform, ops, kernels, finding, STALL_SECONDS)
    hidden, weights, ids = inputs
    nobody = torch.full_like(ids, -1)
    out = torch.zeros_like(hidden, dtype=torch.float64)
    at = nobody.clone()

    def step() -> None:
        out.copy_(executor.decode(0, hidden, weights, at))

    step()  # pins its memory, and has nothing to do
    torch.cuda.synchronize()
    executor.check()
    graph = CudaDevice().capture(step) if captured else None
    at.copy_(ids)

    def launch() -> None:
        if graph is None:
            step()
        else:
            executor.announce(1)
            graph.replay()

    error_after(executor, launch, "no progress for 50 ms")
    with pytest.raises(_native.HandshakeError):
        executor.decode_submit(0, hidden, weights, at)
    torch.cuda.synchronize()
    if graph is not None:
        graph.close()
    with contextlib.suppress(RuntimeError):  # if the job is still under way
        executor.close()


def test_a_graph_that_is_never_launched_is_an_error(
    findings: dict[_native.Mechanism, _native.HandshakeFinding],
    kernels: list[CpuExpertKernel],
    platform: GpuPlatform,
) -> None:
    finding = findings[platform.handshake_choice.mechanism]
    executor = make_executor(platform, platform.cpu_ops, kernels, finding, 0.2)
    executor.announce(len(LAYERS))
    end = time.monotonic() + BACK_WITHIN_SECONDS
    with pytest.raises(_native.HandshakeError, match="though 3 handshakes were submitted"):
        while time.monotonic() < end:
            executor.check()
            time.sleep(0.01)
    executor.close()
