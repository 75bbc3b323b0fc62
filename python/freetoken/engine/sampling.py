"""Choosing the next token of every row of a step.

In NumPy, on the calling thread: a row of logits is small, and torch's own threads would compete
with the worker pool for the cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from freetoken.errors import FreeTokenError
from freetoken.scheduler.params import SamplingParams

UInt64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

# Nearly always this many of the most probable tokens reach top_p, and sorting all is not needed.
_NUCLEUS_GUESS = 512


@dataclass(frozen=True)
class SamplingRow:
    """One row of logits: its parameters, its place in the random stream, and the tokens so far.

    `index` is how many tokens were generated before; `tokens` are the prompt and the output.
    """

    params: SamplingParams
    seed: int
    index: int
    tokens: Sequence[int]


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """One token id per row of logits float32 [R, V].

    Steps, as in vLLM: repetition penalty, temperature, min_p, top_k, top_p, draw. Each row's result
    depends on that row alone. Raises FreeTokenError if a row holds no usable number.
    """
    values: Float32 = _penalize(logits.numpy(force=True), rows)
    best = values.argmax(axis=-1)  # of equal ones the first; NaN counts as the largest
    _refuse_unusable(values[np.arange(len(rows)), best], rows)
    numbers = uniform(
        np.array([row.seed for row in rows], dtype=np.uint64),
        np.array([row.index for row in rows], dtype=np.uint64),
    )
    return [
        _draw(values[i], row.params, float(numbers[i]))
        if row.params.temperature > 0
        else int(best[i])
        for i, row in enumerate(rows)
    ]


def uniform(seeds: UInt64, indices: UInt64) -> Float64:
    """Numbers in [0, 1), a pure function of (seed, index): splitmix64's finaliser, twice."""
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN)
        bits = _mix(state + (indices + np.uint64(1)) * _GOLDEN)
    numbers: Float64 = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mix(x: UInt64) -> UInt64:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    x = x ^ (x >> np.uint64(31))
    return x


def _refuse_unusable(largest: Float32, rows: Sequence[SamplingRow]) -> None:
    """A row's maximum is finite unless it holds NaN or +inf, or nothing but -inf."""
    usable = np.isfinite(largest)
    if not usable.all():
        bad = int(np.flatnonzero(~usable)[0])
        raise FreeTokenError(
            f"the model computed NaN or infinite logits for row {bad} of {len(rows)} "
            f"(token {rows[bad].index} of its output); finite numbers were expected. The "
            "weights are damaged or overflow: check the file, or try another conversion of it"
        )


def _penalize(logits: Float32, rows: Sequence[SamplingRow]) -> Float32:
    """Tokens seen before: positive logits are divided by the penalty, negative ones multiplied."""
    penalized = [i for i, row in enumerate(rows) if row.params.repetition_penalty != 1]
    if not penalized:
        return logits
    logits = logits.copy()
    for i in penalized:
        seen = np.unique(np.asarray(rows[i].tokens, dtype=np.int64))
        values = logits[i, seen]
        penalty = np.float32(rows[i].params.repetition_penalty)
        logits[i, seen] = np.where(values > 0, values / penalty, values * penalty)
    return logits


def _draw(logits: Float32, params: SamplingParams, number: float) -> int:
    """The token that `number` in [0, 1) picks from one row of logits."""
    weights = _weights(logits, params)
    if params.top_k == 0 and params.top_p == 1:
        return _invert(weights, number)
    ids = _most_probable(weights, params)
    return int(ids[_invert(weights[ids], number)])


def _weights(logits: Float32, params: SamplingParams) -> Float64:
    """Temperature and min_p: unnormalised probabilities, the largest 1, dropped tokens 0."""
    x = logits.astype(np.float64)
    # The maximum goes first: dividing by a tiny temperature must not overflow to a NaN.
    x -= x.max()
    with np.errstate(over="ignore"):
        x /= params.temperature
    weights: Float64 = np.exp(x)
    weights[weights < params.min_p] = 0.0
    return weights


def _most_probable(weights: Float64, params: SamplingParams) -> Int64:
    """Ids that top_k and then top_p keep, most probable first (ties: lower id)."""
    vocab = len(weights)
    keep = min(params.top_k or vocab, vocab)
    if params.top_p == 1:
        return _leading(weights, keep)[:keep]
    if keep < vocab:
        ids = _leading(weights, keep)[:keep]
        return ids[: _nucleus(weights[ids], float(weights[ids].sum()) * params.top_p)]
    limit = float(weights.sum()) * params.top_p
    ids = _leading(weights, min(_NUCLEUS_GUESS, vocab))
    if float(weights[ids].sum()) < limit:
        ids = _leading(weights, vocab)
    return ids[: _nucleus(weights[ids], limit)]


def _leading(weights: Float64, count: int) -> Int64:
    """Ids of the `count` largest weights and of all that equal the last of them, sorted."""
    if count == len(weights):
        return np.argsort(-weights, kind="stable")
    least = np.partition(weights, -count)[-count]
    ids = np.flatnonzero(weights >= least)
    return ids[np.argsort(-weights[ids], kind="stable")]


def _nucleus(weights: Float64, limit: float) -> int:
    """How many of the sorted weights to keep: a token stays if those before it fall short of the
    limit, so the first one always does."""
    return int(np.searchsorted(np.cumsum(weights)[:-1], limit, side="left")) + 1


def _invert(weights: Float64, number: float) -> int:
    """The index at which the running sum of the weights passes `number` of the whole."""
    reached = np.cumsum(weights)
    index = int(np.searchsorted(reached, number * reached[-1], side="right"))
    # Rounding may put the point at the very end: then the last token of any weight is meant.
    return min(index, int(np.searchsorted(reached, reached[-1], side="left")))
