"""The native operators against the same ones in plain torch, through the Ops protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freetoken import _native
from freetoken.checkpoints.base import TensorEntry
from freetoken.formats import (
    BF16,
    DS_FP4,
    F32,
    FP8_128,
    MXFP4_PAIRS,
    NVFP4_PAIRS,
    PlanarFormat,
)
from freetoken.formats.base import WeightFormat
from freetoken.kernels.activations import Activation, ClampedSwiGlu
from freetoken.kernels.cpu import CpuOps
from support.operator_cases import close, numbers
from support.reference_ops import ReferenceOps

REFERENCE = ReferenceOps(int8_activations=True)


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """The reference's tiny products are quicker without torch's own threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=_native.detected_isas(), scope="module")
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    made = CpuOps(threads=2, isa=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("shape", [(1, 576), (7, 40), (3, 5, 64)])
def test_norms(ops: CpuOps, shape: tuple[int, ...]) -> None:
    x, weight = numbers(*shape, seed=1, scale=3), numbers(shape[-1], seed=2)
    close(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    added, up = x.reshape(-1, shape[-1]), numbers(*shape, seed=3).reshape(-1, shape[-1])
    ours, theirs = up.clone(), up.clone()
    close(
        ops.add_rms_norm(added, ours, weight, 1e-6),
        REFERENCE.add_rms_norm(added, theirs, weight, 1e-6),
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "activation", ["silu", "gelu", "gelu_tanh", "relu2", ClampedSwiGlu(), ClampedSwiGlu(1.1, 0.5)]
)
def test_gated_activations(ops: CpuOps, activation: Activation) -> None:
    gate, up = numbers(7, 43, seed=20, scale=5), numbers(7, 43, seed=21, scale=5)
    found = ops.gated_activation(gate, up, activation)
    expected = REFERENCE.gated_activation(gate, up, activation)
    torch.testing.assert_close(found, expected, rtol=5e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dims", [16, 64])
def test_rotary(ops: CpuOps, interleaved: bool, rotary_dims: int) -> None:
    angles = numbers(5, rotary_dims // 2, seed=4)
    q, k = numbers(5, 6, 64, seed=5), numbers(5, 2, 64, seed=6)
    expected_q, expected_k = q.clone(), k.clone()
    ops.rotary_(q, k, angles.cos(), angles.sin(), interleaved=interleaved)
    REFERENCE.rotary_(expected_q, expected_k, angles.cos(), angles.sin(), interleaved=interleaved)
    close(q, expected_q)
    close(k, expected_k)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 17, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 40), (4, 1, 128)])
def test_a_cache_filled_by_write_kv_is_attended(
    ops: CpuOps, heads: int, kv_heads: int, dim: int, window: int | None, has_sinks: bool
) -> None:
    page_tokens, lengths = 16, (37, 290)
    pages = torch.randperm(40, generator=torch.Generator().manual_seed(7))[:38].int() + 1
    table = pages.view(2, 19)
    k_cache = torch.full((41, page_tokens, kv_heads, dim), float("nan"))
    v_cache = k_cache.clone()
    for row, length in enumerate(lengths):
        positions = torch.arange(length)
        slots = table[row].long()[positions // page_tokens] * page_tokens
        ops.write_kv(
            numbers(length, kv_heads, dim, seed=8 + row),
            numbers(length, kv_heads, dim, seed=18 + row),
            k_cache,
            v_cache,
            slots + positions % page_tokens,
        )
    sequence = torch.tensor([0] * 37 + [1, 1, -1, 1], dtype=torch.int32)
    positions = torch.tensor([*range(37), 0, 289, 5, 256], dtype=torch.int32)
    q = numbers(len(sequence), heads, dim, seed=30)
    arguments = (q, k_cache, v_cache, table, sequence, positions)
    sinks = numbers(heads, seed=31, scale=2) if has_sinks else None
    options: dict[str, Any] = {"scale": dim**-0.5, "window": window, "sinks": sinks}
    found = ops.paged_attention(*arguments, **options)
    close(found, REFERENCE.paged_attention(*arguments, **options), 5e-6)
    assert torch.equal(found[39], torch.zeros(heads, dim))
    for t in (0, 15, 16, 36, 38, 40):
        alone = ops.paged_attention(
            q[t : t + 1].clone(),
            k_cache,
            v_cache,
            table,
            sequence[t : t + 1].clone(),
            positions[t : t + 1].clone(),
            **options,
        )
        assert torch.equal(alone[0], found[t])


@pytest.mark.parametrize("renormalize", [False, True])
def test_routes(ops: CpuOps, renormalize: bool) -> None:
    logits = numbers(50, 60, seed=9, scale=3).round(decimals=1)
    logits[7, 3] = float("nan")
    weights, ids = ops.route_topk(logits, 4, renormalize=renormalize)
    expected_weights, expected_ids = REFERENCE.route_topk(logits, 4, renormalize=renormalize)
    sound = torch.arange(50) != 7
    assert torch.equal(ids[sound], expected_ids[sound])
    close(weights[sound], expected_weights[sound])
    assert weights[7].isnan().all()
    assert ((ids[7] >= 0) & (ids[7] < 60)).all() and len(set(ids[7].tolist())) == 4


@pytest.mark.parametrize("activations", ["int8", "exact"])
@pytest.mark.parametrize(
    ("fmt", "rows", "cols"),
    [
        (MXFP4_PAIRS, 33, 96),
        (NVFP4_PAIRS, 33, 96),
        (DS_FP4, 33, 160),
        (FP8_128, 576, 256),
        (FP8_128, 130, 160),
    ],
    ids=lambda value: str(value.name if isinstance(value, PlanarFormat) else value),
)
def test_linear_and_embed_with_scales_apart(
    fmt: PlanarFormat, rows: int, cols: int, activations: str
) -> None:
    generator = np.random.default_rng(cols)
    data = generator.integers(0, 256, rows * fmt.row_bytes(cols), dtype=np.uint8)
    data[(data & 0x7F) == 0x7F] = 0  # NaN in e4m3
    scale_rows, scale_bytes = fmt.scale_plane(rows, cols)
    if fmt is FP8_128:
        scales = generator.uniform(0.001, 0.01, scale_rows * scale_bytes // 4)
        scales = scales.astype(np.float32).view(np.uint8)
    else:
        low = 122 if fmt.scales.bytes == 1 and fmt is not NVFP4_PAIRS else 32
        scales = generator.integers(low, low + 8, scale_rows * scale_bytes, dtype=np.uint8)
    factors = np.array(0.37, np.float32) if fmt is NVFP4_PAIRS else None
    entry = TensorEntry("w", fmt, (rows, cols), Path("w"), data, scales, factors)
    reference = ReferenceOps(int8_activations=activations == "int8")
    theirs = reference.matrix(entry)
    x, bias, ids = numbers(5, cols, seed=13), numbers(rows, seed=14), torch.tensor([0, rows - 1])
    for isa in _native.detected_isas():
        ops = CpuOps(threads=2, isa=isa, activations=activations)
        ours = ops.matrix(entry)
        close(ops.linear(x, ours, bias), reference.linear(x, theirs, bias), 1e-5)
        close(ops.embed(ids, ours), reference.embed(ids, theirs))
        ops.close()


@pytest.mark.parametrize("fmt", [F32, BF16])
def test_linear_and_embed_of_plain_floats(ops: CpuOps, fmt: WeightFormat) -> None:
    values = numbers(33, 48, seed=10).to(torch.bfloat16)
    data = values.float().numpy() if fmt is F32 else values.view(torch.int16).numpy()
    entry = TensorEntry("w", fmt, (33, 48), Path("w"), data.view(np.uint8).reshape(-1))
    ours, theirs = ops.matrix(entry), REFERENCE.matrix(entry)
    x, bias, ids = numbers(5, 48, seed=11), numbers(33, seed=12), torch.tensor([0, 32, 7])
    close(ops.linear(x, ours, bias), REFERENCE.linear(x, theirs, bias))
    assert torch.equal(ops.embed(ids, ours), REFERENCE.embed(ids, theirs))
