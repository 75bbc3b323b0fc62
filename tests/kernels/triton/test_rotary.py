"""Rotary embeddings and cache writes against the reference."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels.triton.ops import TritonOps
from support.operator_cases import bfloat16_error, close, numbers
from support.reference_ops import ReferenceOps

REFERENCE = ReferenceOps()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("q_heads", "k_heads", "dim", "rotary_dims"), [(6, 2, 64, 64), (9, 3, 64, 16), (4, 4, 20, 12)]
)
def test_rotary(
    device: str, interleaved: bool, q_heads: int, k_heads: int, dim: int, rotary_dims: int
) -> None:
    angles = numbers(5, rotary_dims // 2, seed=4)
    cos, sin = angles.cos(), angles.sin()
    q, k = numbers(5, q_heads, dim, seed=5), numbers(5, k_heads, dim, seed=6)
    ours = q.clone().to(device), k.clone().to(device)
    TritonOps(device).rotary_(*ours, cos.to(device), sin.to(device), interleaved=interleaved)
    REFERENCE.rotary_(q, k, cos, sin, interleaved=interleaved)
    close(ours[0], q)
    close(ours[1], k)
    assert torch.equal(ours[0].cpu()[..., rotary_dims:], q[..., rotary_dims:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(3, 20), (5, 256)])
def test_write_kv_touches_its_slots_alone(
    device: str, dtype: torch.dtype, heads: int, dim: int
) -> None:
    k, v = numbers(3, heads, dim, seed=7), numbers(3, heads, dim, seed=8)
    k[0, 0, :4] = torch.tensor([float("nan"), float("inf"), 1.00390625, 1.01171875])  # ties
    slots = torch.tensor([11, 0, 6])
    caches = [torch.full((4, 3, heads, dim), 7.0, dtype=dtype) for _ in range(2)]
    ours = [cache.clone().to(device) for cache in caches]
    TritonOps(device).write_kv(k.to(device), v.to(device), *ours, slots.to(device))
    REFERENCE.write_kv(k.to(dtype), v.to(dtype), *caches, slots)
    exact = device != "cpu" or dtype is torch.float32
    error = 0 if exact else 2 * bfloat16_error(device)  # of either
    for found, expected in zip(ours, caches, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=error, atol=0, equal_nan=True)
