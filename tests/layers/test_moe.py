"""The MoE layer routes, delegates, and supplies the expert callback."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freetoken.checkpoints.base import TensorEntry
from freetoken.layers.linear import Linear
from freetoken.layers.moe import OffloadMoELayer
from freetoken.models.spec import MoeSpec
from freetoken.moe.hybrid_decode import GpuExpertRunner
from freetoken.moe.phase import Phase
from support.moe_fakes import TOY_F32, OrderedOps

SPEC = MoeSpec(experts=4, top_k=2, intermediate=8, renormalize=True, activation="silu")
ROUTER = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])


class RecordingStrategy:
    """Writes down what the layer delegates, and answers with a marked tensor."""

    def __init__(self) -> None:
        self.runners: dict[int, GpuExpertRunner] = {}
        self.calls: list[tuple[str, int, Tensor, Tensor, Tensor]] = []
        self.added = torch.tensor(1.0, dtype=torch.float64)

    def register(self, layer_id: int, runner: GpuExpertRunner) -> None:
        self.runners[layer_id] = runner

    def decode(self, layer_id: int, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        self.calls.append(("decode", layer_id, hidden, weights, ids))
        return hidden.double() + self.added

    def prefill(self, layer_id: int, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        self.calls.append(("prefill", layer_id, hidden, weights, ids))
        return hidden.double() + 2


class RecordingKernel:
    """An expert kernel that only knows that it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        self.calls.append((hidden, weights, ids))
        return hidden * 3

    def submit(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> RecordingKernel:
        raise AssertionError("the layer's callback runs at once")

    def wait(self) -> Tensor:
        raise AssertionError("nothing was submitted")


def make_layer(
    strategy: RecordingStrategy, kernel: RecordingKernel | None, bias: Tensor | None = None
) -> OffloadMoELayer:
    ops = OrderedOps()
    data = ROUTER.numpy().reshape(-1).view("uint8")
    matrix = ops.matrix(TensorEntry("router", TOY_F32, (4, 2), "router.bin", data))  # type: ignore[arg-type]
    router = Linear(ops, matrix, bias)
    return OffloadMoELayer(7, router, SPEC, ops, strategy, kernel)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phase", "name", "added"), [(Phase.DECODE, "decode", 1), (Phase.PREFILL, "prefill", 2)]
)
def test_routes_are_delegated_by_phase(phase: Phase, name: str, added: int) -> None:
    strategy = RecordingStrategy()
    x = torch.tensor([[2.0, 1.0], [-1.0, -3.0]])
    out = make_layer(strategy, None).forward(x, phase)
    ((called, layer_id, hidden, weights, ids),) = strategy.calls
    assert (called, layer_id) == (name, 7)
    assert hidden is x
    assert ids.tolist() == [[0, 1], [3, 2]]
    assert ids.dtype == torch.int32
    odds = torch.tensor([[1.0, 2.0]]).exp().flip(1)
    torch.testing.assert_close(weights[:1], odds / odds.sum())
    assert torch.equal(out, x + added)


def test_a_router_bias_counts() -> None:
    strategy = RecordingStrategy()
    bias = torch.tensor([-9.0, 0.0, 0.0, 5.0])
    make_layer(strategy, None, bias).forward(torch.tensor([[2.0, 1.0]]), Phase.DECODE)
    _, _, _, weights, ids = strategy.calls[0]
    assert ids.tolist() == [[3, 1]]
    odds = torch.tensor([[4.0, 1.0]]).exp()
    torch.testing.assert_close(weights, odds / odds.sum())


def test_padded_rows_ask_for_nothing() -> None:
    strategy = RecordingStrategy()
    x = torch.tensor([[2.0, 1.0], [-1.0, -3.0]])
    make_layer(strategy, None).forward(x, Phase.DECODE, torch.tensor([False, True]))
    _, _, _, weights, ids = strategy.calls[0]
    assert ids.tolist() == [[0, 1], [-1, -1]]
    assert ids.is_contiguous()
    assert weights[1].tolist() == [0.0, 0.0]
    assert weights[0].sum() == pytest.approx(1.0)


def test_the_registered_callback_is_the_layers_kernel() -> None:
    strategy, kernel = RecordingStrategy(), RecordingKernel()
    make_layer(strategy, kernel)
    hidden, weights = torch.ones(1, 2), torch.ones(1, 2)
    slots = torch.zeros(1, 2, dtype=torch.int32)
    assert torch.equal(strategy.runners[7](hidden, weights, slots), hidden * 3)
    ((got_hidden, got_weights, got_slots),) = kernel.calls
    assert got_hidden is hidden
    assert got_weights is weights
    assert got_slots is slots


def test_the_sum_over_experts_is_rounded_once() -> None:
    strategy = RecordingStrategy()
    strategy.added = torch.tensor([2.0**-24, 3 * 2.0**-25], dtype=torch.float64)
    x = torch.ones(1, 2)
    out = make_layer(strategy, None).forward(x, Phase.DECODE)
    assert out.dtype == torch.float32
    assert out.tolist() == [[1.0, 1.0 + 2.0**-23]]


def test_without_slots_there_is_no_callback() -> None:
    strategy = RecordingStrategy()
    make_layer(strategy, None)
    assert strategy.runners == {}
