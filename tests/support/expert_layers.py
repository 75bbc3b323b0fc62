"""Random experts in device banks, and what they must compute, with a bound on the error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.formats.base import WeightFormat
from freetoken.kernels.activations import Activation
from freetoken.kernels.triton.expert_bank import NONE, DeviceBank, DevicePart
from freetoken.moe.store import ExpertTensor, LayerExperts, RecordLayout
from support.random_weights import random_matrix
from support.reference_ops import fp8_rounded, gated

FLOAT32_STEP = 2.0**-24  # the largest relative error of rounding
BFLOAT16_STEP = 2.0**-8  # the same, for an interpreter that cuts off

Formats = tuple[WeightFormat, WeightFormat, WeightFormat]


def random_layer(
    seed: int,
    formats: Formats | WeightFormat,
    *,
    hidden: int,
    inner: int,
    experts: int = 3,
    activation: Activation = "silu",
    extras: bool = False,
) -> LayerExperts:
    """A layer of random experts; with `extras` they have factors and biases."""
    rng = np.random.default_rng(seed)
    gate, up, down = formats if isinstance(formats, tuple) else (formats,) * 3

    def part(name: str, fmt: WeightFormat, rows: int, cols: int) -> ExpertTensor:
        made = [random_matrix(rng, fmt, rows, cols) for _ in range(experts)]
        return ExpertTensor(
            name,
            fmt,
            rows,
            cols,
            tuple(codes.reshape(-1) for codes, _ in made),
            tuple(scales for _, scales in made if scales is not None),
            rng.uniform(0.5, 2, experts).astype(np.float32) if extras else None,
            rng.normal(size=(experts, rows)).astype(np.float32) if extras else None,
        )

    parts = (
        part("gate", gate, inner, hidden),
        part("up", up, inner, hidden),
        part("down", down, hidden, inner),
    )
    return LayerExperts(0, *parts, activation)


def device_bank(layer: LayerExperts, device: str) -> DeviceBank:
    """The layer's experts as records in the device's memory."""
    layout = RecordLayout.of(layer)
    records = np.zeros((layer.experts, layout.record_bytes), np.uint8)
    for expert in range(layer.experts):
        layout.pack(layer, expert, records[expert])
    gate, up, down = (
        DevicePart(
            part.format,
            part.rows,
            part.cols,
            part.codes.offset,
            part.scales.offset,
            part.factor.offset if part.factor.bytes else NONE,
            part.bias.offset if part.bias.bytes else NONE,
        )
        for part in layout.parts
    )
    return DeviceBank(torch.from_numpy(records).to(device), gate, up, down, layer.activation)


@dataclass(frozen=True)
class Expected:
    """What a kernel must compute, float64 [T, H], and how far it may be off."""

    numbers: Tensor
    bound: Tensor


def expected(
    layer: LayerExperts, x: Tensor, weights: Tensor, ids: Tensor, *, bfloat16: bool
) -> Expected:
    """With float32 sums a product of n terms is off by n roundings of the sum of their sizes at
    most; with bfloat16 both factors of each term are rounded besides."""
    numbers = torch.zeros(x.shape, dtype=torch.float64)
    bound = torch.zeros(x.shape, dtype=torch.float64)
    for token, route in np.argwhere((ids.numpy() >= 0) & (weights.numpy() != 0)):
        expert, weight = int(ids[token, route]), weights[token, route].double()
        gate = _product(layer.gate, expert, x[token].double(), 0.0, bfloat16)
        up = _product(layer.up, expert, x[token].double(), 0.0, bfloat16)
        inner = gated(layer.activation, gate[0], up[0])
        inner_bound = _activation_bound(layer.activation, gate, up) + 8 * FLOAT32_STEP * inner.abs()
        down = _product(layer.down, expert, inner, inner_bound, bfloat16)
        numbers[token] += weight * down[0]
        bound[token] += weight.abs() * (down[1] + 2 * FLOAT32_STEP * down[0].abs())
    return Expected(numbers, bound)


def _product(
    part: ExpertTensor, expert: int, x: Tensor, x_bound: Tensor | float, bfloat16: bool
) -> tuple[Tensor, Tensor]:
    """Weights times x plus bias, and its bound, float64 [rows]."""
    w = torch.from_numpy(weights_of(part, expert))
    if part.format.name == "DS_FP4":
        x = fp8_rounded(x[None].float())[0].double()
        x_bound = x_bound + x.abs() / 8  # another step of e4m3
    bias = torch.zeros(part.rows, dtype=torch.float64)
    if part.biases is not None:
        bias = torch.from_numpy(part.biases[expert]).double()
    sizes = w.abs() @ x.abs() + bias.abs()
    # The codes that a scale multiplies are up to four times as large as their numbers on average:
    # some formats subtract an offset from the sum of many.
    step = (part.cols + 8) * FLOAT32_STEP * 4 + (2 * BFLOAT16_STEP if bfloat16 else 0.0)
    return w @ x + bias, step * sizes + w.abs() @ (x.abs() * 0 + x_bound)


def _activation_bound(
    activation: Activation, gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor]
) -> Tensor:
    """act is steeper than 1.2 nowhere but for the square, which has twice its argument."""
    one = torch.ones_like(gate[0])
    slope = 2 * (gate[0].abs() + gate[1]) if activation == "relu2" else 1.2 * one
    size = gated(activation, gate[0], one).abs()
    return slope * gate[1] * (up[0].abs() + up[1] + 1) + (size + slope * gate[1]) * up[1]


def weights_of(part: ExpertTensor, expert: int) -> npt.NDArray[np.float64]:
    """One expert's matrix by the format's reference, with its factor: float64 [rows, cols]."""
    codes = part.experts[expert].reshape(part.rows, -1)
    if part.format.scale_block is None:
        numbers = part.format.dequantize(codes)
    else:
        numbers = part.format.dequantize_planes(codes, part.scales[expert])
    factor = 1.0 if part.factors is None else float(part.factors[expert])
    return numbers.astype(np.float64) * factor


def assert_within(found: Tensor, wanted: Expected) -> None:
    assert found.dtype == torch.float64
    error = (found.cpu() - wanted.numbers).abs()
    worst = (error / wanted.bound.clamp(min=1e-300)).max()
    assert (error <= wanted.bound).all(), f"{worst:.3g} times the bound"


def routes(ids: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32)
