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
from freetoken.formats import FORMATS
from freetoken.kernels.base import ExpertBank, ExpertPart
from freetoken.kernels.cpu import CpuOps

H, INNER, E, T = 96, 64, 5, 7


@pytest.fixture(scope="module", params=_native.detected_isas())
def pools(request: pytest.FixtureRequest) -> Iterator[list[CpuOps]]:
    pools = [CpuOps(threads, request.param) for threads in (1, 2, 3)]
    yield pools
    for ops in pools:
        ops.close()


def packed(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random weights of that format whose scales are ordinary numbers."""
    fmt = FORMATS[name]
    rng = np.random.default_rng(seed)
    blocks = int(np.prod(shape)) // fmt.block_elements
    if fmt.scales.bytes == 0:
        values = rng.standard_normal(blocks).astype(np.float32)
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype({"F32": np.float32, "F16": np.float16}[name]).view(np.uint8)
    data = rng.integers(0, 256, (blocks, fmt.block_bytes), dtype=np.uint8)
    scales = rng.uniform(-0.02, 0.02, (blocks, fmt.scales.bytes // 2)).astype(np.float16)
    at = fmt.scales.offset
    data[:, at : at + fmt.scales.bytes] = scales.view(np.uint8)
    return data.reshape(-1)


def entry(name: str, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry("w", FORMATS[name], shape, Path("test"), packed(name, shape, 1))


def part(name: str, rows: int, cols: int, seed: int) -> tuple[ExpertPart, np.ndarray]:
    fmt = FORMATS[name]
    data = packed(name, (E, rows, cols), seed).reshape(E, -1)
    starts = np.array([expert.ctypes.data for expert in data], np.uint64)
    row = fmt.row_bytes(cols)
    bytes_ = fmt.block_bytes
    codes, scales = starts + np.uint64(fmt.codes.offset), starts + np.uint64(fmt.scales.offset)
    return ExpertPart(fmt, rows, cols, codes, scales, row, bytes_, row, bytes_), data


def bank(name: str, activation: str = "silu") -> ExpertBank:
    parts = [part(name, *shape) for shape in ((INNER, H, 1), (INNER, H, 2), (H, INNER, 3))]
    gate, up, down = (native for native, _ in parts)
    return ExpertBank(gate, up, down, activation, [data for _, data in parts])


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
    with pytest.raises(CheckpointError, match=r"no matrix[\s\S]*\[2, 3, 96\][\s\S]*two dimensions"):
        pools[0].matrix(entry("F32", (2, 3, H)))
    with pytest.raises(CheckpointError, match=r"activation[\s\S]*tanh[\s\S]*silu"):
        pools[0].expert_kernel(bank("F32", "tanh"))
