"""Products with weights of every format against the reference.

The bounds are those of the arithmetic: in float32 a sum of n products is off by at most n 2^-24 of
the sum of their sizes, and where both factors are rounded to bfloat16, each is by that of itself.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from freetoken.checkpoints.base import TensorEntry
from freetoken.errors import CheckpointError
from freetoken.formats import BF16, F16, F32, FORMATS, FP8_128, Q4_0, Q6_K
from freetoken.formats.base import WeightFormat
from freetoken.kernels.triton import linear
from freetoken.kernels.triton.linear import FEW_TOKENS
from freetoken.kernels.triton.ops import TritonOps
from support.operator_cases import bfloat16_error, numbers, same_product
from support.random_weights import random_matrix
from support.reference_ops import ReferenceOps, multiplied

REFERENCE = ReferenceOps()
all_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())


def entry_of(fmt: WeightFormat, rows: int, cols: int, seed: int = 5) -> TensorEntry:
    data, scales = random_matrix(np.random.default_rng(seed), fmt, rows, cols)
    factors = np.array(0.37, np.float32) if fmt.name == "NVFP4_PAIRS" else None
    planes = None if scales is None else scales.reshape(-1)
    return TensorEntry("w", fmt, (rows, cols), Path("w"), data.reshape(-1), planes, factors)


def check(
    found: torch.Tensor, x: torch.Tensor, entry: TensorEntry, bias: torch.Tensor | None
) -> None:
    device = found.device.type
    reference = REFERENCE.matrix(entry)
    expected = REFERENCE.linear(x, reference, bias)
    sizes = multiplied(x, entry.format, False).abs() @ reference.weight.abs().T
    rounding = bfloat16_error(device)
    if x.shape[0] <= FEW_TOKENS or entry.format is F32:
        rounding = 0
    relative = 2 * rounding + rounding**2 + (x.shape[1] + 8) * 2**-24
    off = (found.cpu().double() - expected.double()).abs()
    assert found.shape == expected.shape
    assert (off <= relative * sizes + 2**-23 * expected.abs()).all(), float((off / sizes).max())


@all_formats
@pytest.mark.parametrize(("tokens", "rows"), [(1, 9), (3, 3), (FEW_TOKENS + 1, 70), (19, 3)])
def test_linear(device: str, fmt: WeightFormat, tokens: int, rows: int) -> None:
    cols = 1280 if fmt.block_elements == 256 else 160
    if fmt.name == "NVFP4":
        cols = 192
    entry = entry_of(fmt, rows, cols)
    x, bias = numbers(tokens, cols, seed=13), numbers(rows, seed=14)
    ops = TritonOps(device)
    w = ops.matrix(entry)
    check(ops.linear(x.to(device), w, bias.to(device)), x, entry, bias)


@pytest.mark.parametrize("fmt", [F32, F16, BF16, FP8_128])
@pytest.mark.parametrize(("tokens", "cols"), [(2, 155), (FEW_TOKENS + 1, 155), (1, 1), (1, 1601)])
def test_any_number_of_columns(device: str, fmt: WeightFormat, tokens: int, cols: int) -> None:
    entry = entry_of(fmt, 5, cols)
    x = numbers(tokens, cols, seed=13)
    ops = TritonOps(device)
    check(ops.linear(x.to(device), ops.matrix(entry)), x, entry, None)


@pytest.mark.parametrize("tokens", [1, 2, FEW_TOKENS + 2])
@pytest.mark.parametrize("formats", [(Q4_0, Q4_0, Q4_0), (BF16, BF16), (Q4_0, Q6_K, Q4_0), (F32,)])
@pytest.mark.parametrize("biases", ["none", "all", "some"])
def test_a_group_is_its_members_one_by_one(
    device: str, tokens: int, formats: tuple[WeightFormat, ...], biases: str
) -> None:
    sizes = (6, 1, 3)[: len(formats)]
    entries = [entry_of(f, n, 256, seed=n) for f, n in zip(formats, sizes, strict=True)]
    given = {"none": (), "all": range(3), "some": (1,)}[biases]
    bias = [numbers(n, seed=n) if i in given else None for i, n in enumerate(sizes)]
    x = numbers(tokens, 256, seed=3)
    ops = TritonOps(device)
    w = tuple(ops.matrix(entry) for entry in entries)
    on_device = tuple(None if b is None else b.to(device) for b in bias)
    found = ops.linear_group(x.to(device), w, on_device)
    for out, entry, b, matrix in zip(found, entries, bias, w, strict=True):
        check(out, x, entry, b)
        assert out.is_contiguous()
        alone = ops.linear(x.to(device), matrix, None if b is None else b.to(device))
        check(alone, x, entry, b)


@pytest.mark.parametrize("tokens", [FEW_TOKENS, 33])
def test_a_token_has_the_same_bits_in_any_company(device: str, tokens: int) -> None:
    ops = TritonOps(device)
    w = ops.matrix(entry_of(Q4_0, 5, 320))
    x = numbers(tokens, 320, seed=2).to(device)
    found = ops.linear(x, w)
    least = 1 if tokens <= FEW_TOKENS else FEW_TOKENS + 1
    same_product(ops.linear(x[-least:].contiguous(), w), found[-least:], device)


@pytest.mark.parametrize("tokens", [2, FEW_TOKENS + 1])
def test_what_is_no_number_stays_in_its_token(device: str, tokens: int) -> None:
    ops = TritonOps(device)
    x = numbers(tokens, 160, seed=1)
    x[1, 159] = float("nan")
    found = ops.linear(x.to(device), ops.matrix(entry_of(BF16, 9, 160))).cpu()
    assert found[1].isnan().all() and found[torch.arange(tokens) != 1].isfinite().all()


def test_rows_enough_for_blocks_of_them(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows are computed several at a time; the last block has rows to spare."""
    monkeypatch.setattr(linear, "_PROGRAMS", 2)
    entry = entry_of(BF16, 18, 24)
    x = numbers(1, 24, seed=6)
    ops = TritonOps(device)
    check(ops.linear(x.to(device), ops.matrix(entry)), x, entry, None)


def test_what_is_no_matrix_is_refused(device: str) -> None:
    entry = TensorEntry("v", F32, (4,), Path("file"), np.zeros(16, np.uint8))
    with pytest.raises(CheckpointError, match="no matrix"):
        TritonOps(device).matrix(entry)
