"""Experts of every weight format, packed, on the GPU and on the CPU: the same within the bound."""

from __future__ import annotations

import pytest
import torch
from gpu_device import Device
from torch import Tensor

from freetoken.formats import FORMATS, MXFP4_PAIRS, Q4_0, Q8_0
from freetoken.formats.base import WeightFormat
from freetoken.kernels.activations import ClampedSwiGlu
from freetoken.moe.device_bank import device_bank
from freetoken.moe.store import LayerExperts, PackedExpertStore
from freetoken.platforms.gpu import GpuPlatform
from support.expert_layers import assert_within, expected, random_layer
from support.gpu_rig import DRY, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

EXPERTS, TOP_K = 5, 2
# The second has more routes than are computed one by one.
TOKENS = pytest.mark.parametrize("tokens", [3, 40], ids=["decode", "prefill"])


def sizes(fmt: WeightFormat) -> tuple[int, int]:
    """H and I that leave remainders wherever blocks can."""
    return {
        "BF16": (72, 40),
        "F16": (72, 40),
        "F32": (72, 40),
        "FP8_128": (160, 136),
        "NVFP4_PAIRS": (112, 48),
        "NVFP4": (192, 64),
    }.get(fmt.name, (512, 256) if fmt.block_elements == 256 else (160, 96))


def routes(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights and ids of all tokens but the last, whose row is padding; expert 1 has a route of
    weight zero."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
    weights = torch.rand(tokens, TOP_K, generator=generator) + 0.1
    ids[0], weights[0, 0] = torch.tensor([1, 4]), 0.0
    ids[-1], weights[-1] = -1, 0.0
    return weights, ids.to(torch.int32).contiguous()


def compare(layer: LayerExperts, tokens: int, device: Device, platform: GpuPlatform) -> None:
    """GPU and CPU each against float64, so against each other at twice the bound."""
    store = PackedExpertStore([layer], platform)
    on_device = store.records(0).to(device.device)
    kernel = platform.ops.experts(device_bank(store.layouts[0], on_device))
    hidden = layer.gate.cols
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1))
    weights, ids = routes(tokens, seed=2)
    wanted = expected(layer, x, weights, ids, bfloat16=tokens * TOP_K > 64)
    at = device.device
    assert_within(kernel(x.to(at), weights.to(at), ids.to(at)).cpu(), wanted)
    exact = expected(layer, x, weights, ids, bfloat16=False)
    assert_within(platform.cpu_ops.expert_kernel(store.bank(0))(x, weights, ids), exact)


@TOKENS
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
def test_every_format(
    fmt: WeightFormat, tokens: int, device: Device, platform: GpuPlatform
) -> None:
    if fmt.name not in platform.cpu_ops.formats:
        pytest.skip(f"the CPU has no kernel for {fmt.name}")
    hidden, inner = sizes(fmt)
    layer = random_layer(3, fmt, hidden=hidden, inner=inner, experts=EXPERTS)
    compare(layer, tokens, device, platform)


@TOKENS
def test_mixed_formats_with_biases_factors_and_clamps(
    tokens: int, device: Device, platform: GpuPlatform
) -> None:
    layer = random_layer(
        4,
        (MXFP4_PAIRS, Q8_0, Q4_0),
        hidden=96,
        inner=64,
        experts=EXPERTS,
        activation=ClampedSwiGlu(),
        extras=True,
    )
    compare(layer, tokens, device, platform)


@pytest.mark.skipif(DRY, reason="the interpreter would take hours")
@pytest.mark.parametrize("tokens", [1, 8, 32])
@pytest.mark.parametrize("fmt", [Q4_0, MXFP4_PAIRS], ids=lambda fmt: fmt.name)
def test_sizes_of_a_real_model(
    fmt: WeightFormat, tokens: int, device: Device, platform: GpuPlatform
) -> None:
    """Many steps of a row, and steps that are not full (2880 columns)."""
    layer = random_layer(5, fmt, hidden=2880, inner=2880 // 2, experts=EXPERTS)
    compare(layer, tokens, device, platform)
