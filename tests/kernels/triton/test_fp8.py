"""The FP8 round trip of activations against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels.triton.fp8 import fp8_rounded
from support.operator_cases import numbers
from support.reference_ops import fp8_rounded as reference


@pytest.mark.parametrize("cols", [128, 160, 32, 384])
def test_numbers_of_all_sizes(device: str, cols: int) -> None:
    """From one block's largest down to what rounds to zero: the lower half is subnormal in e4m3."""
    x = numbers(4, cols, seed=1) * torch.exp2(-torch.arange(cols) % 24.0)
    x[2] *= 2.0**100
    x[3] *= 1e-5  # below the least scale
    assert torch.equal(fp8_rounded(x.to(device)).cpu(), reference(x))


def test_ties_go_to_even(device: str) -> None:
    eighths = torch.arange(128) / 16 * 2.0 ** torch.tensor([[0.0], [-9.0], [-12.0]])
    x = torch.where(torch.arange(128) == 0, 448.0, eighths)  # a scale of one
    assert torch.equal(fp8_rounded(x.to(device)).cpu(), reference(x))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_block_alone(device: str, bad: float) -> None:
    x = numbers(2, 256, seed=2)
    x[1, 200] = bad
    found = fp8_rounded(x.to(device)).cpu()
    assert found[1, 128:].isnan().all()
    assert torch.equal(found[:, :128], reference(x)[:, :128]) and found[0].isfinite().all()
