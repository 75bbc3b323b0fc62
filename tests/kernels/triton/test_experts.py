"""Experts on the GPU against a float64 reference, in both ways of computing them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from freetoken.errors import CheckpointError
from freetoken.formats import BF16, F16, FORMATS, FP8_128, MXFP4_PAIRS, NVFP4_PAIRS, Q4_0, Q8_0
from freetoken.formats.base import ByteRange, WeightFormat
from freetoken.formats.bf16 import BF16Format
from freetoken.kernels.activations import Activation, ClampedSwiGlu
from freetoken.kernels.triton import expert_sizes
from freetoken.kernels.triton import experts as module
from freetoken.kernels.triton.expert_bank import DeviceBank, DevicePart
from freetoken.kernels.triton.expert_prefill import sort_routes_kernel
from freetoken.kernels.triton.expert_sizes import (
    MANY_REGISTERS,
    Sizes,
    decode_block_k,
    gate_up_constants,
    gate_up_tiles_constants,
    most_tiles,
)
from freetoken.kernels.triton.experts import ExpertScratch, TritonExpertKernel
from support.expert_layers import (
    Expected,
    Formats,
    assert_within,
    device_bank,
    expected,
    random_layer,
    routes,
)

ACTIVATIONS: list[Activation] = ["silu", "gelu", "gelu_tanh", "relu2", ClampedSwiGlu(1.5, 2.0)]
all_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "prefill":
        monkeypatch.setattr(module, "DECODE_ROUTES", 0)
    return str(request.param)


ways = pytest.mark.parametrize("way", ["decode", "prefill"], indirect=True)


@pytest.fixture
def few_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by programs, so that it gets larger ones."""
    if device == "cpu":
        monkeypatch.setattr(expert_sizes, "MANY_REGISTERS", Sizes(64, (16, 64)))
        monkeypatch.setattr(expert_sizes, "TILE_COLUMNS", 256)


def hidden_states(tokens: int, hidden: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed))


def run(bank: DeviceBank, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    device = bank.records.device
    kernel = TritonExpertKernel(bank)
    return kernel(x.to(device), weights.to(device), ids.to(device)).cpu()


def sizes(fmt: WeightFormat) -> tuple[int, int]:
    """H and I that leave remainders: of blocks of rows, of steps, and of units where blocks can."""
    return {
        "BF16": (37, 21),
        "F16": (40, 24),
        "F32": (34, 7),
        "FP8_128": (160, 136),
        "NVFP4_PAIRS": (112, 48),
        "NVFP4": (192, 64),
    }.get(fmt.name, (512, 256) if fmt.block_elements == 256 else (160, 96))


@all_formats
@ways
def test_every_format(way: str, few_programs: None, fmt: WeightFormat, device: str) -> None:
    hidden, inner = sizes(fmt)
    layer = random_layer(1, fmt, hidden=hidden, inner=inner)
    x, ids = hidden_states(2, hidden), routes([[2, 0], [-1, 2]])
    weights = torch.tensor([[0.7, 0.4], [0.1, -1.5]])
    if fmt.block_elements == 256:  # large matrices: one route will do
        x, ids, weights = x[:1], ids[:1, :1], weights[:1, :1].contiguous()
    found = run(device_bank(layer, device), x, weights, ids.contiguous())
    assert_within(found, expected(layer, x, weights, ids, bfloat16=way == "prefill"))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@ways
def test_every_activation(
    way: str, few_programs: None, activation: Activation, device: str
) -> None:
    """Gates up to a dozen on either side, where clamps and flat ends are."""
    layer = random_layer(2, F16, hidden=24, inner=40, activation=activation)
    x, ids, weights = 8 * hidden_states(3, 24), routes([[0], [1], [2]]), torch.ones(3, 1)
    found = run(device_bank(layer, device), x, weights, ids)
    assert_within(found, expected(layer, x, weights, ids, bfloat16=way == "prefill"))


@ways
def test_factors_biases_and_mixed_formats(way: str, few_programs: None, device: str) -> None:
    layer = random_layer(
        3, (MXFP4_PAIRS, Q8_0, Q4_0), hidden=96, inner=64, activation=ClampedSwiGlu(), extras=True
    )
    x, ids, weights = hidden_states(2, 96), routes([[0, 1], [2, 0]]), torch.rand(2, 2) + 0.1
    found = run(device_bank(layer, device), x, weights, ids)
    assert_within(found, expected(layer, x, weights, ids, bfloat16=way == "prefill"))


@pytest.mark.parametrize(
    "formats", [(FP8_128, BF16, F16), (BF16, FP8_128, F16)], ids=["gate", "up"]
)
@ways
def test_scales_of_one_part_beside_wider_steps_of_the_other(
    way: str, few_programs: None, formats: Formats, device: str
) -> None:
    """No whole units of FP8 codes, whose steps must not be wider than what shares a scale."""
    layer = random_layer(12, formats, hidden=504, inner=16)
    x, ids, weights = hidden_states(1, 504), routes([[1, 2]]), torch.tensor([[0.6, 0.4]])
    found = run(device_bank(layer, device), x, weights, ids)
    assert_within(found, expected(layer, x, weights, ids, bfloat16=way == "prefill"))


def test_every_two_formats_have_steps_that_both_can_read() -> None:
    for (gate, cols), up in itertools.product(
        ((fmt, cols) for fmt in FORMATS.values() for cols in (8, 24, 136, 504, 4096)),
        FORMATS.values(),
    ):
        if cols % math.lcm(gate.block_elements, up.block_elements):
            continue
        parts = [DevicePart(fmt, 16, cols, 0, 0) for fmt in (gate, up)]
        down = DevicePart(F16, cols, 16, 0, 0)
        bank = DeviceBank(torch.zeros(1, 16, dtype=torch.uint8), *parts, down, "silu")
        step, tile = (
            gate_up_constants(bank, MANY_REGISTERS)["BLOCK_K"],
            gate_up_tiles_constants(bank)["BK"],
        )
        for part in parts:
            kernels, names = part.kernels, (gate.name, up.name, cols)
            assert kernels.least_block_k <= tile <= kernels.most_block_k, names
            if part.whole_units:
                assert step >= kernels.unit, names
            else:
                assert kernels.least_block_k <= step <= kernels.most_block_k, names


@pytest.mark.parametrize("part", ["gate", "up", "down"])
@pytest.mark.parametrize("what", ["factors", "biases"])
@ways
def test_only_one_part_has_a_factor_or_a_bias(way: str, what: str, part: str, device: str) -> None:
    layer = random_layer(4, BF16, hidden=16, inner=16)
    extra = getattr(getattr(random_layer(5, BF16, hidden=16, inner=16, extras=True), part), what)
    layer = replace(layer, **{part: replace(getattr(layer, part), **{what: extra})})
    x, ids, weights = hidden_states(1, 16), routes([[1]]), torch.ones(1, 1)
    found = run(device_bank(layer, device), x, weights, ids)
    assert_within(found, expected(layer, x, weights, ids, bfloat16=way == "prefill"))


@pytest.mark.parametrize("top_k", [1, 5, 16])
@ways
def test_any_top_k(way: str, top_k: int, device: str) -> None:
    layer = random_layer(6, BF16, hidden=16, inner=16, experts=17)
    ids = torch.randperm(17)[None, :top_k].to(torch.int32)
    x, weights = hidden_states(1, 16), torch.rand(1, top_k) + 0.1
    found = run(device_bank(layer, device), x, weights, ids)
    assert_within(found, expected(layer, x, weights, ids, bfloat16=way == "prefill"))


def test_many_tokens_of_few_experts(device: str) -> None:
    """More routes than decode takes, in tiles of 64: experts fill two of them, or none."""
    layer = random_layer(7, Q4_0, hidden=32, inner=32, experts=4)
    ids = torch.tensor([[3, 1]] * 66 + [[1, -1]] * 6, dtype=torch.int32)
    x, weights = hidden_states(72, 32), torch.rand(72, 2) + 0.1
    assert MANY_REGISTERS.tile(ids.numel(), 4) == 64
    found = run(device_bank(layer, device), x, weights, ids)
    assert_within(found, expected(layer, x, weights, ids, bfloat16=True))


@ways
def test_what_is_skipped_is_not_read(way: str, device: str) -> None:
    """An expert whose every byte is 0xFF, all NaN, behind ids of -1 and weights of zero."""
    layer = random_layer(8, F16, hidden=16, inner=16, extras=True)
    bank = device_bank(layer, device)
    bank.records[1] = 0xFF
    x, ids = hidden_states(3, 16), routes([[0, 1], [-1, 2], [1, -1]])
    x[2] = torch.nan
    weights = torch.tensor([[0.5, 0.0], [torch.nan, 0.3], [-0.0, 1.0]])
    found = run(bank, x, weights, ids)
    wanted = expected(layer, x[:2], weights[:2], ids[:2], bfloat16=way == "prefill")
    assert_within(found[:2], wanted)
    assert (found[2] == 0).all(), "no route of the last token counts"


@pytest.mark.parametrize("fmt", [BF16, Q4_0, MXFP4_PAIRS, FP8_128], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@ways
def test_what_is_no_number_stays_with_its_token(
    way: str, few_programs: None, bad: float, fmt: WeightFormat, device: str
) -> None:
    layer = random_layer(9, fmt, hidden=32, inner=32)
    x, ids, weights = hidden_states(3, 32), routes([[0, 1]] * 3), torch.full((3, 2), 0.5)
    x[1, 17] = bad
    found = run(device_bank(layer, device), x, weights, ids)
    assert not torch.isfinite(found[1]).any()
    sound = [0, 2]
    wanted = expected(layer, x[sound], weights[sound], ids[sound], bfloat16=way == "prefill")
    assert_within(found[sound], wanted)


@pytest.mark.parametrize(
    "fmt, plane, bad",
    [
        (FP8_128, "codes", [0x7F]),
        (FP8_128, "codes", [0xFF]),
        (MXFP4_PAIRS, "scales", [0xFF]),
        (NVFP4_PAIRS, "scales", [0x7F]),
        (Q4_0, "scales", [0x00, 0x7E]),
        (Q8_0, "scales", [0x00, 0xFC]),
    ],
    ids=lambda value: value.name if isinstance(value, WeightFormat) else str(value),
)
@ways
def test_a_bad_row_of_down_spoils_its_column(
    way: str, few_programs: None, fmt: WeightFormat, plane: str, bad: list[int], device: str
) -> None:
    """NaN and infinities among codes and scales, as the formats define them."""
    bank = device_bank(random_layer(20, fmt, hidden=32, inner=64), device)
    where = bank.down.planes("DOWN")
    stride = where["DOWN_CODE_STRIDE" if plane == "codes" else "DOWN_SCALE_STRIDE"]
    start = getattr(bank.down, plane) + 9 * stride
    bank.records[1, start : start + len(bad)] = torch.tensor(bad, dtype=torch.uint8)
    found = run(bank, hidden_states(1, 32), torch.ones(1, 1), routes([[1]]))
    spoilt = ~torch.isfinite(found[0])
    assert spoilt.nonzero().flatten().tolist() == [9]


@ways
def test_a_weight_that_is_no_number_shows(way: str, device: str) -> None:
    layer = random_layer(10, BF16, hidden=16, inner=16)
    weights = torch.tensor([[torch.nan, 0.5]])
    found = run(device_bank(layer, device), hidden_states(1, 16), weights, routes([[0, 1]]))
    assert torch.isnan(found).all()


@ways
def test_the_same_bits_again_and_in_any_company(way: str, few_programs: None, device: str) -> None:
    layer = random_layer(11, NVFP4_PAIRS, hidden=64, inner=32)
    bank = device_bank(layer, device)
    x, ids, weights = hidden_states(3, 64), routes([[0, 1], [1, 2], [2, 0]]), torch.rand(3, 2)
    found = run(bank, x, weights, ids)
    assert torch.equal(found, run(bank, x, weights, ids))
    for token in range(3):
        alone = slice(token, token + 1)
        assert torch.equal(found[alone], run(bank, x[alone], weights[alone], ids[alone]))


def test_divided_routes_add_up_to_the_same_bits(few_programs: None, device: str) -> None:
    """What hybrid decode rests on."""
    layer = random_layer(12, Q4_0, hidden=32, inner=32)
    bank = device_bank(layer, device)
    x, ids, weights = hidden_states(2, 32), routes([[0, 1, 2], [2, 1, 0]]), torch.rand(2, 3)
    ours = torch.tensor([[True, False, True], [False, False, True]])
    first = run(bank, x, torch.where(ours, weights, 0.0), ids)
    second = run(bank, x, weights, torch.where(ours, -1, ids))
    assert torch.equal(run(bank, x, weights, ids), first + second)


def test_layers_share_scratch(device: str) -> None:
    scratch = ExpertScratch.on(torch.device(device))
    for seed, hidden, inner in ((13, 16, 48), (14, 64, 16), (15, 16, 16)):
        layer = random_layer(seed, BF16, hidden=hidden, inner=inner)
        kernel = TritonExpertKernel(device_bank(layer, device), scratch)
        x, ids, weights = hidden_states(1, hidden), routes([[2]]), torch.ones(1, 1)
        found = kernel(x.to(device), weights.to(device), ids.to(device))
        assert_within(found, expected(layer, x, weights, ids, bfloat16=False))


def test_no_tokens(device: str) -> None:
    bank = device_bank(random_layer(16, BF16, hidden=16, inner=16), device)
    found = run(bank, torch.empty(0, 16), torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32))
    assert found.shape == (0, 16) and found.dtype == torch.float64


def test_sorted_routes(device: str) -> None:
    """Against a stable sort; more routes than a program looks at together."""
    rng = np.random.default_rng(17)
    count, experts = 3000, 5
    ids = rng.choice([-1, 0, 1, 2, 4], count).astype(np.int32)  # none has expert 3
    weights = rng.choice([0.0, 1.0, np.nan], count).astype(np.float32)
    starts, counts, order = (
        torch.full((n,), -7, dtype=torch.int32, device=device) for n in (experts, experts, count)
    )
    sort_routes_kernel[(experts,)](
        torch.from_numpy(weights).to(device),
        torch.from_numpy(ids).to(device),
        starts,
        counts,
        order,
        count,
        BLOCK=1024,
    )
    active = np.flatnonzero((ids >= 0) & (weights != 0))
    wanted = active[np.argsort(ids[active], kind="stable")]
    np.testing.assert_array_equal(order.cpu()[: len(active)], wanted)
    assert (order[len(active) :] == -7).all(), "nothing is written beyond the routes that count"
    each = np.bincount(ids[active], minlength=experts)
    np.testing.assert_array_equal(counts.cpu(), each)
    np.testing.assert_array_equal(starts.cpu(), np.cumsum(each) - each)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.sampled_from([16, 64, 128]))
def test_no_division_has_more_tiles(counts: list[int], size: int) -> None:
    tiles = sum(-(-count // size) for count in counts)
    assert tiles <= most_tiles(sum(counts), len(counts), size)


def test_tiles_have_as_many_routes_as_an_expert_expects() -> None:
    sizes = Sizes(8, (16, 64, 128))
    found = [sizes.tile(routes, 8) for routes in (1, 128, 135, 136, 512, 520, 9999)]
    assert found == [16, 16, 16, 64, 64, 128, 128]


@given(st.integers(1, 200), st.sampled_from([4, 8, 16, 32, 64]))
def test_decode_steps_are_powers_of_two_of_whole_units(units: int, unit: int) -> None:
    step = decode_block_k(units * unit, unit)
    assert step & (step - 1) == 0 and unit <= step <= 32 * unit


def test_what_has_no_kernel_is_named(device: str) -> None:
    bank = device_bank(random_layer(18, BF16, hidden=16, inner=16), device)
    with pytest.raises(CheckpointError, match="swish"):
        TritonExpertKernel(replace(bank, activation="swish"))  # type: ignore[arg-type]
    other = BF16Format("Q3_X", 1, 2, ByteRange(0, 2), ByteRange(0, 0))
    with pytest.raises(CheckpointError, match="Q3_X"):
        TritonExpertKernel(replace(bank, down=replace(bank.down, format=other)))


def test_the_bound_would_notice(device: str) -> None:
    """A result without one of its terms lies outside of it."""
    layer = random_layer(19, BF16, hidden=16, inner=16)
    x, ids, weights = hidden_states(1, 16), routes([[0, 1]]), torch.ones(1, 2)
    wanted: Expected = expected(layer, x, weights, ids, bfloat16=True)
    without = run(device_bank(layer, device), x, weights, routes([[0, -1]]))
    with pytest.raises(AssertionError, match="times the bound"):
        assert_within(without, wanted)
