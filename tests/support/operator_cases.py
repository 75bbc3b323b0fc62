"""Numbers that operators are tested with, and how far results may lie apart."""

from __future__ import annotations

import torch


def bfloat16_error(device: str) -> float:
    """By how much of itself a number changes that is rounded to bfloat16; Triton's interpreter cuts
    off its last places."""
    return 2**-8 if device == "cpu" else 2**-9


def numbers(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def close(found: torch.Tensor, expected: torch.Tensor, relative: float = 2e-6) -> None:
    """Equal up to a share of each number and of the largest. `found` may be on a device."""
    found = found.cpu()
    assert found.dtype == expected.dtype and found.shape == expected.shape
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=relative, atol=relative * largest)


def same_product(found: torch.Tensor, expected: torch.Tensor, device: str) -> None:
    """Equal bits on a device. The interpreter's matrix products (of NumPy) depend, by a rounding
    or two, on where in a tile a row lies."""
    if device == "cpu":
        close(found, expected.cpu(), 1e-6)
    else:
        assert torch.equal(found, expected)
