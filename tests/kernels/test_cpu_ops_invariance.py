"""Bit for bit: a token's result depends on neither its batch nor the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken import _native
from freetoken.checkpoints.base import TensorEntry
from freetoken.errors import CheckpointError
from freetoken.formats import F32, FORMATS
from freetoken.kernels.activations import Activation
from freetoken.kernels.base import ExpertBank
from freetoken.kernels.cpu import CpuOps
from freetoken.moe.store import ExpertTensor, LayerExperts, MappedExpertStore
from support.random_weights import random_matrix

H, INNER, E, T = 256, 512, 5, 7


@pytest.fixture(scope="module", params=_native.detected_isas())
def pools(request: pytest.FixtureRequest) -> Iterator[list[CpuOps]]:
    pools = [CpuOps(threads, request.param) for threads in (1, 2, 3)]
    yield pools
    for ops in pools:
        ops.close()


def entry(name: str, shape: tuple[int, int]) -> TensorEntry:
    data, scales = random_matrix(np.random.default_rng(1), FORMATS[name], *shape)
    flat = None if scales is None else scales.reshape(-1)
    return TensorEntry("w", FORMATS[name], shape, Path("test"), data.reshape(-1), flat)


def part(which: str, name: str, rows: int, cols: int, seed: int) -> ExpertTensor:
    rng = np.random.default_rng(seed)
    experts, scales = zip(
        *(random_matrix(rng, FORMATS[name], rows, cols) for _ in range(E)), strict=True
    )
    apart = () if scales[0] is None else scales
    return ExpertTensor(which, FORMATS[name], rows, cols, experts, apart)


def bank(name: str, activation: Activation = "silu") -> ExpertBank:
    layer = LayerExperts(
        0,
        part("gate", name, INNER, H, 1),
        part("up", name, INNER, H, 2),
        part("down", name, H, INNER, 3),
        activation,
    )
    return MappedExpertStore([layer]).bank(0)


def assert_same(results: list[Tensor]) -> None:
    assert torch.isfinite(results[0]).all() and results[0].abs().sum() > 0
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.mark.parametrize("name", FORMATS)
def test_linear(pools: list[CpuOps], name: str) -> None:
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1))
    results = []
    for ops in pools:
        w = ops.matrix(entry(name, (37, H)))
        results.append(ops.linear(x, w))
        results.append(torch.cat([ops.linear(x[t : t + 1], w) for t in range(T)]))
    assert_same(results)


@pytest.mark.parametrize("name", FORMATS)
def test_experts(pools: list[CpuOps], name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weights = torch.randn(T, H, generator=generator), torch.rand(T, 2, generator=generator)
    ids = torch.randint(-1, E, (T, 2), dtype=torch.int32, generator=generator)
    results = []
    for ops in pools:
        kernel = ops.expert_kernel(bank(name))
        results.append(kernel(x, weights, ids))
        results.append(kernel.submit(x, weights, ids).wait())
        rows = [slice(t, t + 1) for t in range(T)]
        results.append(torch.cat([kernel(x[r], weights[r], ids[r]) for r in rows]))
    assert_same(results)


def test_attention(pools: list[CpuOps]) -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(T, 6, 8, generator=generator)
    caches = torch.randn(2, 30, 4, 2, 8, generator=generator)
    table = torch.arange(1, 25, dtype=torch.int32).view(2, 12)
    sequence = torch.tensor([0, 0, 1, 1, 0, 1, 0], dtype=torch.int32)
    positions = torch.tensor([0, 40, 3, 17, 47, 2, 9], dtype=torch.int32)
    results = []
    for ops in pools:
        for rows in ([slice(0, T)], [slice(t, t + 1) for t in range(T)]):
            parts = [
                ops.paged_attention(
                    q[r],
                    caches[0],
                    caches[1],
                    table,
                    sequence[r],
                    positions[r],
                    scale=0.35,
                    window=None,
                )
                for r in rows
            ]
            results.append(torch.cat(parts))
    assert_same(results)


def test_norm_takes_any_leading_dimensions(pools: list[CpuOps]) -> None:
    x, weight = torch.randn(2, 3, 5, H), torch.rand(H)
    for ops in pools:
        assert_same(
            [ops.rms_norm(x, weight, 1e-6), ops.rms_norm(x.view(-1, H), weight, 1e-6).view_as(x)]
        )
        with pytest.raises(TypeError, match="x: found strided memory"):
            ops.rms_norm(x.transpose(0, 1), weight, 1e-6)


def test_what_has_no_kernel_is_named(pools: list[CpuOps]) -> None:
    with pytest.raises(
        CheckpointError, match=r"no matrix[\s\S]*\[2, 3, 256\][\s\S]*two dimensions"
    ):
        stack = TensorEntry("w", F32, (2, 3, H), Path("test"), np.zeros(6 * H * 4, np.uint8))
        pools[0].matrix(stack)
    with pytest.raises(CheckpointError, match=r"activation[\s\S]*tanh[\s\S]*silu"):
        pools[0].expert_kernel(bank("F32", "tanh"))  # type: ignore[arg-type]
