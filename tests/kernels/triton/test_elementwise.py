"""Activations and embeddings against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from freetoken.checkpoints.base import TensorEntry
from freetoken.errors import CheckpointError
from freetoken.formats import FORMATS
from freetoken.formats.base import WeightFormat
from freetoken.kernels.activations import Activation, ClampedSwiGlu
from freetoken.kernels.triton.ops import TritonOps
from support.operator_cases import close, numbers
from support.random_weights import random_matrix
from support.reference_ops import ReferenceOps

REFERENCE = ReferenceOps()
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu2", ClampedSwiGlu(), ClampedSwiGlu(1.1, 0.5)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations(device: str, activation: Activation) -> None:
    gate, up = numbers(7, 443, seed=20, scale=5), numbers(7, 443, seed=21, scale=5)
    found = TritonOps(device).gated_activation(gate.to(device), up.to(device), activation)
    expected = REFERENCE.gated_activation(gate, up, activation)
    torch.testing.assert_close(found.cpu(), expected, rtol=5e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_activation_hides_what_is_not_finite(device: str, activation: Activation) -> None:
    bad = torch.tensor([float("nan"), float("inf"), float("-inf")])
    gate = torch.cat([bad, torch.full((6,), 0.5)])
    up = torch.cat([torch.full((3,), 0.5), bad, torch.full((3,), 0.5)])
    found = TritonOps(device).gated_activation(gate.to(device), up.to(device), activation)
    assert not found[:6].isfinite().any()
    assert found[6:].isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_numbers_do_not_overflow_on_the_way(device: str, activation: Activation) -> None:
    gate = torch.tensor([1e15, -1e15, 300.0, -300.0])
    up = torch.full((4,), 0.25)
    found = TritonOps(device).gated_activation(gate.to(device), up.to(device), activation)
    torch.testing.assert_close(
        found.cpu(), REFERENCE.gated_activation(gate, up, activation), rtol=1e-5, atol=1e-30
    )


def test_an_unknown_activation_is_refused(device: str) -> None:
    x = torch.zeros(1, device=device)
    with pytest.raises(CheckpointError, match="no GPU kernel for this activation"):
        TritonOps(device).gated_activation(x, x, cast(Any, "tanh"))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
def test_embeddings_of_every_format(device: str, fmt: WeightFormat) -> None:
    rows, cols = 130, 768 if fmt.block_elements > 1 else 200
    data, scales = random_matrix(np.random.default_rng(5), fmt, rows, cols)
    factors = np.array(0.37, np.float32) if fmt.name == "NVFP4_PAIRS" else None
    planes = None if scales is None else scales.reshape(-1)
    entry = TensorEntry("w", fmt, (rows, cols), Path("w"), data.reshape(-1), planes, factors)
    ids = torch.tensor([0, rows - 1, 7, 7])
    ops = TritonOps(device)
    found = ops.embed(ids.to(device), ops.matrix(entry))
    close(found, REFERENCE.embed(ids, REFERENCE.matrix(entry)), 1e-7)
