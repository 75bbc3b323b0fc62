"""RMS norms against the reference."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels.triton.ops import TritonOps
from support.operator_cases import close, numbers
from support.reference_ops import ReferenceOps

REFERENCE = ReferenceOps()


@pytest.mark.parametrize("shape", [(1, 576), (5, 40), (3, 5, 64), (2, 1), (0, 8)])
def test_norms(device: str, shape: tuple[int, ...]) -> None:
    ops = TritonOps(device)
    x, weight = numbers(*shape, seed=1, scale=3), numbers(shape[-1], seed=2)
    close(ops.rms_norm(x.to(device), weight.to(device), 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    added, residual = x.reshape(-1, shape[-1]), numbers(*shape, seed=3).reshape(-1, shape[-1])
    ours, theirs = residual.clone().to(device), residual.clone()
    close(
        ops.add_rms_norm(added.to(device), ours, weight.to(device), 1e-2),
        REFERENCE.add_rms_norm(added, theirs, weight, 1e-2),
    )
    assert torch.equal(ours.cpu(), theirs)


def test_a_row_that_is_no_number_stays_alone(device: str) -> None:
    x, weight = numbers(3, 33, seed=4), torch.ones(33)
    x[1, 32] = float("nan")
    found = TritonOps(device).rms_norm(x.to(device), weight.to(device), 1e-5).cpu()
    assert found[1].isnan().all() and found[0].isfinite().all() and found[2].isfinite().all()


def test_a_row_of_zeros_is_zero(device: str) -> None:
    x = torch.zeros(1, 7, device=device)
    found = TritonOps(device).rms_norm(x, torch.ones(7, device=device), 1e-6)
    assert torch.equal(found.cpu(), torch.zeros(1, 7))
