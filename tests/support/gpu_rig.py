"""What the tests of tests/gpu run on: the GPU that is there.

FREETOKEN_GPU_TESTS=dry runs them without one, as `gpu_device` describes, and a few replays in place
of a thousand: to find mistakes in the tests themselves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from gpu_device import CudaDevice, Device, DryDevice, runtime_experts
from torch import Tensor

from freetoken.formats import MXFP4_PAIRS, Q4_0, Q8_0
from freetoken.kernels.activations import ClampedSwiGlu
from freetoken.moe.lru import UNLIMITED
from freetoken.moe.runtime import MoeConfig, OffloadMoeRuntime
from freetoken.moe.store import LayerExperts
from freetoken.moe.strategies import make_strategy
from freetoken.platforms.gpu import GpuPlatform
from freetoken.platforms.graphs import Graph
from support.expert_layers import Expected, expected, random_layer

DRY = os.environ.get("FREETOKEN_GPU_TESTS") == "dry" and not torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(
    not DRY and not torch.cuda.is_available(), reason="torch sees no GPU here"
)
needs_driver = pytest.mark.skipif(DRY, reason="a dry run has no driver")

HIDDEN, INNER, EXPERTS, TOP_K = 96, 64, 9, 3


def make_device() -> Device:
    return DryDevice() if DRY else CudaDevice()


def model_layers(count: int = 3) -> list[LayerExperts]:
    """Layers in different formats; the second has biases, factors and a clamped activation."""
    sizes: dict[str, Any] = {"hidden": HIDDEN, "inner": INNER, "experts": EXPERTS}
    kinds: list[dict[str, Any]] = [
        {"formats": Q4_0},
        {"formats": MXFP4_PAIRS, "activation": ClampedSwiGlu(), "extras": True},
        {"formats": (Q8_0, Q4_0, Q8_0)},
    ]
    return [
        replace(random_layer(20 + i, **kinds[i % 3], **sizes), layer_id=i) for i in range(count)
    ]


@dataclass(frozen=True)
class Inputs:
    """Of one step: hidden float32 [L, T, H], weights float32 [L, T, K], ids int32 [L, T, K]."""

    hidden: Tensor
    weights: Tensor
    ids: Tensor

    @staticmethod
    def random(tokens: int, seed: int, layers: int = 3, *, padded: bool = False) -> Inputs:
        """Every row asks for distinct experts. With `padded` the last token's row is padding."""
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(layers, tokens, HIDDEN, generator=generator)
        ids = torch.rand(layers, tokens, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K]
        weights = torch.rand(layers, tokens, TOP_K, generator=generator) + 0.1
        if padded:
            ids[:, -1], weights[:, -1] = -1, 0.0
        return Inputs(hidden, weights, ids.to(torch.int32).contiguous())

    def expected(self, layers: Sequence[LayerExperts], layer_id: int) -> Expected:
        parts = self.hidden[layer_id], self.weights[layer_id], self.ids[layer_id]
        return expected(layers[layer_id], *parts, bfloat16=False)


@dataclass
class Steps:
    """Decode steps of one strategy through all layers, eager or captured, on standing tensors."""

    device: Device
    runtime: OffloadMoeRuntime
    tokens: int
    hidden: Tensor = field(init=False)
    weights: Tensor = field(init=False)
    ids: Tensor = field(init=False)
    outs: Tensor = field(init=False)
    _graph: Graph | None = None

    def __post_init__(self) -> None:
        self.layers = len(self.runtime.experts)
        shape = self.layers, self.tokens
        on = self.device.device
        self.hidden = torch.zeros(*shape, HIDDEN, device=on)
        self.weights = torch.zeros(*shape, TOP_K, device=on)
        self.ids = torch.zeros(*shape, TOP_K, dtype=torch.int32, device=on)
        self.outs = torch.zeros(*shape, HIDDEN, dtype=torch.float64, device=on)
        self.strategy = make_strategy(self.runtime)
        for layer_id in range(self.layers):
            kernel = self.runtime.slot_kernel(layer_id)
            if kernel is not None:
                self.strategy.register(layer_id, kernel)

    def capture(self) -> None:
        """From now on steps are replays. One step must have run before."""
        self._graph = self.device.capture(self._work)

    def replay_now(self) -> None:
        """Launch the graph on what the standing tensors hold, and wait for nothing."""
        assert self._graph is not None
        self._graph.replay()

    def run(self, inputs: Inputs) -> Tensor:
        """float64 [L, T, H] on the host."""
        for standing, new in (
            (self.hidden, inputs.hidden),
            (self.weights, inputs.weights),
            (self.ids, inputs.ids),
        ):
            standing.copy_(new)
        self.outs.fill_(float("nan"))
        if self._graph is None:
            self._work()
        else:
            if self.cpu is not None:
                self.cpu.announce(self.layers)
            self.replay_now()
        self.device.synchronize()
        if self.cpu is not None:
            self.cpu.check()
        return self.outs.cpu()

    @property
    def cpu(self) -> Any:
        """The CPU executor, or None where the strategy has none."""
        has_cpu = self.runtime.config.strategy in ("cpu", "hybrid")
        return self.runtime.cpu if has_cpu else None

    def release(self) -> None:
        """Let go of the graph."""
        self.device.synchronize()
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def close(self) -> None:
        self.release()
        self.runtime.close()

    def _work(self) -> None:
        for i in range(self.layers):
            out = self.strategy.decode(i, self.hidden[i], self.weights[i], self.ids[i])
            self.outs[i].copy_(out)


def make_steps(
    device: Device,
    platform: GpuPlatform,
    layers: Sequence[LayerExperts],
    config: MoeConfig,
    tokens: int,
) -> Steps:
    runtime = OffloadMoeRuntime.create(
        layers, config, platform, platform.cpu_ops, runtime_experts(platform)
    )
    return Steps(device, runtime, tokens)


__all__ = [
    "DRY",
    "EXPERTS",
    "HIDDEN",
    "INNER",
    "TOP_K",
    "UNLIMITED",
    "Inputs",
    "Steps",
    "make_device",
    "make_steps",
    "model_layers",
    "needs_driver",
    "needs_gpu",
]
