"""The router's choice against the reference."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels.triton.ops import TritonOps
from support.operator_cases import close, numbers
from support.reference_ops import ReferenceOps

REFERENCE = ReferenceOps()


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(12, 60, 4), (3, 512, 16), (5, 5, 5), (2, 1, 1), (0, 8, 2)]
)
def test_routes(device: str, tokens: int, experts: int, top_k: int, renormalize: bool) -> None:
    # one decimal: among so many logits some are equal, a zero of either sign too
    logits = numbers(tokens, experts, seed=9, scale=3).round(decimals=1)
    weights, ids = TritonOps(device).route_topk(logits.to(device), top_k, renormalize=renormalize)
    expected = REFERENCE.route_topk(logits, top_k, renormalize=renormalize)
    assert torch.equal(ids.cpu(), expected[1])
    close(weights, expected[0])


def test_equal_logits_go_to_the_lower_ids(device: str) -> None:
    logits = torch.tensor([[0.0, -0.0, 0.0, -1.0, -0.0, 0.0], [-2.0, -3.0, -2.0, -2.0, -3.0, -2.0]])
    weights, ids = TritonOps(device).route_topk(logits.to(device), 4, renormalize=True)
    assert ids.tolist() == [[0, 1, 2, 4], [0, 2, 3, 5]]
    assert (weights == 0.25).all()


def test_large_and_infinitely_small_logits(device: str) -> None:
    logits = torch.tensor([[3e38, -3e38, float("-inf"), 2.9e38], [-1e30, float("-inf"), -1e30, 5]])
    weights, ids = TritonOps(device).route_topk(logits.to(device), 4, renormalize=False)
    assert ids.tolist() == [[0, 3, 1, 2], [3, 0, 2, 1]]
    assert weights.tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("bits", [0x7FC00000, -1, 0x7F800000])  # NaN of both signs, infinity
def test_no_weight_of_a_token_without_numbers_is_one(
    device: str, bits: int, renormalize: bool
) -> None:
    logits = numbers(3, 60, seed=10)
    logits.view(torch.int32)[1, 3] = bits
    weights, ids = TritonOps(device).route_topk(logits.to(device), 4, renormalize=renormalize)
    assert weights[1].isnan().all() and weights[0].isfinite().all()
    chosen = ids[1].tolist()
    assert all(0 <= e < 60 for e in chosen) and len(set(chosen)) == 4


def test_a_token_that_no_expert_wants(device: str) -> None:
    logits = torch.full((1, 9), float("-inf"), device=device)
    weights, ids = TritonOps(device).route_topk(logits, 3, renormalize=True)
    assert weights.isnan().all() and ids.tolist() == [[0, 1, 2]]
