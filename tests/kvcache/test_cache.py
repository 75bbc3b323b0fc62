"""The cache's tensors."""

from __future__ import annotations

import pytest
import torch

from freetoken.errors import CapacityError
from freetoken.kvcache import KVCache, page_bytes


def test_shapes_and_zeros() -> None:
    kv = KVCache(layers=3, pages=4, page_tokens=2, kv_heads=5, head_dim=6)
    assert len(kv.keys) == len(kv.values) == 3
    for tensor in (*kv.keys, *kv.values):
        assert tensor.shape == (4, 2, 5, 6) and tensor.dtype == torch.float32
        assert not tensor.any()
    assert page_bytes(3, 2, 5, 6) == sum(
        t[0].numel() * t.element_size() for t in (*kv.keys, *kv.values)
    )


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_memory_is_not_touched_before_use() -> None:
    before = resident_bytes()
    kv = KVCache(layers=2, pages=4096, page_tokens=32, kv_heads=4, head_dim=64)
    assert kv.keys[0].numel() * 4 == 2**27
    assert resident_bytes() - before < 2**26


def test_refused_memory_is_an_error_that_says_how_much() -> None:
    with pytest.raises(CapacityError, match=r"cpu refused .* GiB for"):
        KVCache(layers=1, pages=2**40, page_tokens=32, kv_heads=8, head_dim=128)
