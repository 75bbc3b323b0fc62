"""Choosing tokens: against plain definitions, and independent of the batch."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken.engine.sampling import SamplingRow, sample, uniform
from freetoken.errors import FreeTokenError
from freetoken.scheduler import SamplingParams

DRAWS = 2000


def row(
    params: SamplingParams, seed: int = 0, index: int = 0, tokens: tuple[int, ...] = ()
) -> SamplingRow:
    return SamplingRow(params, seed, index, tokens)


def frequencies(logits: list[float], params: SamplingParams) -> dict[int, float]:
    rows = [row(params, seed=7, index=i) for i in range(DRAWS)]
    drawn = sample(torch.tensor([logits]).expand(DRAWS, -1).contiguous(), rows)
    return {token: count / DRAWS for token, count in Counter(drawn).items()}


def probabilities(logits: list[float]) -> list[float]:
    return torch.softmax(torch.tensor(logits, dtype=torch.float64), dim=0).tolist()


def assert_close(found: dict[int, float], expected: dict[int, float]) -> None:
    """Five standard deviations of a binomial frequency."""
    assert set(found) <= set(expected)
    for token, p in expected.items():
        assert abs(found.get(token, 0.0) - p) < 5 * math.sqrt(p * (1 - p) / DRAWS) + 1e-9


def test_greedy_takes_the_largest_and_the_lower_id_on_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, -1.0, 5.0]])
    assert sample(logits, [row(SamplingParams(temperature=0))] * 2) == [1, 0]


def test_temperature() -> None:
    logits = [0.0, 1.0, 2.0]
    for temperature in (0.5, 1.0, 2.0):
        expected = probabilities([x / temperature for x in logits])
        found = frequencies(logits, SamplingParams(temperature=temperature))
        assert_close(found, dict(enumerate(expected)))


def test_a_tiny_temperature_is_greedy() -> None:
    params = SamplingParams(temperature=1e-300)
    assert sample(torch.tensor([[1.0, 1.5, -3.0e38]]), [row(params)]) == [1]


def test_top_k_keeps_k_and_on_ties_the_lower_ids() -> None:
    found = frequencies([1.0, 1.0, 1.0, 0.0], SamplingParams(top_k=2))
    assert_close(found, {0: 0.5, 1: 0.5})
    assert_close(
        frequencies([1.0, 0.0], SamplingParams(top_k=50)),
        dict(enumerate(probabilities([1.0, 0.0]))),
    )


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = [math.log(p) for p in (0.1, 0.5, 0.4)]
    assert_close(frequencies(logits, SamplingParams(top_p=0.45)), {1: 1.0})
    assert_close(frequencies(logits, SamplingParams(top_p=0.55)), {1: 5 / 9, 2: 4 / 9})
    assert_close(frequencies(logits, SamplingParams(top_p=0.95)), {0: 0.1, 1: 0.5, 2: 0.4})


def test_min_p_is_relative_to_the_most_probable() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    assert_close(frequencies(logits, SamplingParams(min_p=0.5)), {0: 5 / 8, 1: 3 / 8})
    assert_close(frequencies(logits, SamplingParams(min_p=1.0)), {0: 1.0})


def test_top_p_counts_what_top_k_and_min_p_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # Of the two that are left the first has 4/7: enough for 0.5, though not of the whole.
    assert_close(frequencies(logits, SamplingParams(top_k=2, top_p=0.5)), {0: 1.0})
    assert_close(frequencies(logits, SamplingParams(min_p=0.7, top_p=0.5)), {0: 1.0})
    assert_close(frequencies(logits, SamplingParams(top_p=0.5)), {0: 4 / 7, 1: 3 / 7})


def test_temperature_comes_before_min_p_and_top_p() -> None:
    logits = [math.log(0.8), math.log(0.2)]
    hot = SamplingParams(temperature=4.0, min_p=0.5)
    assert set(frequencies(logits, hot)) == {0, 1}
    assert set(frequencies(logits, SamplingParams(min_p=0.5))) == {0}


def test_repetition_penalty_as_in_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 30, generator=generator)
    tokens = torch.randint(30, (4, 12), generator=generator)
    for penalty in (0.7, 1.3, 5.0):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone())
        params = SamplingParams(temperature=0, repetition_penalty=penalty)
        rows = [row(params, tokens=tuple(t)) for t in tokens.tolist()]
        before = logits.clone()
        assert sample(logits, rows) == expected.argmax(dim=-1).tolist()
        assert torch.equal(logits, before)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(40, 997, generator=generator)
    kinds = (
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=20, temperature=1.7),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.02),
        SamplingParams(top_p=0.8, top_k=11, min_p=0.01, repetition_penalty=1.4),
    )
    rows = [
        row(kinds[i % len(kinds)], seed=i // 3, index=i % 5, tokens=(i, 2 * i)) for i in range(40)
    ]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(40)]
    assert together == alone


def test_the_stream_is_a_function_of_seed_and_index() -> None:
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 200)
    indices = np.tile(np.arange(200, dtype=np.uint64), 200)
    numbers = uniform(seeds, indices)
    assert np.array_equal(numbers[::-1], uniform(seeds[::-1], indices[::-1]))
    assert len(np.unique(numbers)) == len(numbers)
    assert numbers.min() >= 0 and numbers.max() < 1
    grid = numbers.reshape(200, 200) - 0.5
    # Mean, lag-one products along both axes: five standard deviations.
    for products in (grid, grid[1:] * grid[:-1], grid[:, 1:] * grid[:, :-1]):
        assert abs(products.mean()) < 5 * products.std() / math.sqrt(products.size)
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 99 + 5 * math.sqrt(2 * 99)


def test_the_largest_seed_works() -> None:
    params = SamplingParams(seed=2**64 - 1)
    assert sample(torch.zeros(1, 5), [row(params, seed=2**64 - 1)])[0] in range(5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams()])
def test_unusable_logits_are_an_error(bad: float, params: SamplingParams) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = bad
    with pytest.raises(FreeTokenError, match=r"NaN or infinite logits for row 1 of 2"):
        sample(logits, [row(params)] * 2)


def test_a_row_of_minus_infinity_is_an_error_and_a_few_are_not() -> None:
    nothing: Tensor = torch.full((1, 4), -torch.inf)
    with pytest.raises(FreeTokenError, match="NaN or infinite"):
        sample(nothing, [row(SamplingParams())])
    nothing[0, 3] = 0.0
    assert sample(nothing, [row(SamplingParams())]) == [3]
    assert sample(nothing, [row(SamplingParams(top_p=0.9))]) == [3]


def test_top_p_beyond_the_first_guess_sorts_everything() -> None:
    """Nearly flat over many tokens: compared with the definition on the full sorted row."""
    logits = 0.1 * torch.randn(1, 3000, generator=torch.Generator().manual_seed(1))
    weights = torch.softmax(logits[0].double(), dim=0).sort(descending=True, stable=True)
    kept = int((weights.values.cumsum(0) - weights.values < 0.7).sum())
    assert kept > 1000
    allowed = set(weights.indices[:kept].tolist())
    rows = [row(SamplingParams(top_p=0.7), seed=5, index=i) for i in range(DRAWS)]
    drawn = set(sample(logits.expand(DRAWS, -1), rows))
    assert drawn <= allowed and len(drawn) > kept / 2
