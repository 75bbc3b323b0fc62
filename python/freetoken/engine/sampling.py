"""Choosing the next token of every row of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.errors import FreeTokenError
from freetoken.scheduler.params import SamplingParams

UInt64 = npt.NDArray[np.uint64]
Float64 = npt.NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


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
    _refuse_unusable(logits, rows)
    logits = _penalize(logits, rows)
    chosen = torch.argmax(logits, dim=-1).tolist()
    plain = [i for i, row in enumerate(rows) if _draws(row) and not _truncates(row)]
    sorted_ = [i for i, row in enumerate(rows) if _draws(row) and _truncates(row)]
    for members, draw in ((plain, _draw_plain), (sorted_, _draw_truncated)):
        if members:
            part = [rows[i] for i in members]
            for i, token in zip(members, draw(logits[members], part), strict=True):
                chosen[i] = token
    return [int(token) for token in chosen]


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


def _draws(row: SamplingRow) -> bool:
    return row.params.temperature > 0


def _truncates(row: SamplingRow) -> bool:
    return row.params.top_k > 0 or row.params.top_p < 1


def _refuse_unusable(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """A row's maximum is finite unless it holds NaN or +inf, or nothing but -inf."""
    usable = torch.isfinite(logits.amax(dim=-1))
    if not bool(usable.all()):
        bad = [i for i in range(len(rows)) if not bool(usable[i])]
        raise FreeTokenError(
            f"the model computed NaN or infinite logits for row {bad[0]} of {len(rows)} "
            f"(token {rows[bad[0]].index} of its output); finite numbers were expected. The "
            "weights are damaged or overflow: check the file, or try another conversion of it"
        )


def _penalize(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Tokens seen before: positive logits are divided by the penalty, negative ones multiplied."""
    penalized = [i for i, row in enumerate(rows) if row.params.repetition_penalty != 1]
    if not penalized:
        return logits
    logits = logits.clone()
    for i in penalized:
        seen = torch.from_numpy(np.unique(np.asarray(rows[i].tokens, dtype=np.int64)))
        values = logits[i, seen]
        penalty = rows[i].params.repetition_penalty
        logits[i, seen] = torch.where(values > 0, values / penalty, values * penalty)
    return logits


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def _scaled(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Temperature and min_p: float64 [R, V], the largest 0, dropped tokens -inf."""
    x = logits.double()
    # The maximum goes first: dividing by a tiny temperature must not overflow.
    x = (x - x.amax(dim=-1, keepdim=True)) / _column([row.params.temperature for row in rows])
    floor = torch.log(_column([row.params.min_p for row in rows]))
    return x.masked_fill(x < floor, -torch.inf)


def _draw_plain(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """No top_k, no top_p: draw in the order of ids, without sorting."""
    return _invert(torch.exp(_scaled(logits, rows)), rows).tolist()


def _draw_truncated(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw in the order of probability (ties: lower id)."""
    vocab = logits.shape[-1]
    x, ids = torch.sort(_scaled(logits, rows), dim=-1, descending=True, stable=True)
    keep = _column([float(row.params.top_k or vocab) for row in rows])
    x = x.masked_fill(torch.arange(vocab) >= keep, -torch.inf)
    weights = torch.exp(x)
    reached = torch.cumsum(weights, dim=-1)
    limit = _column([row.params.top_p for row in rows]) * reached[:, -1:]
    # A token stays if those before it fall short of top_p, so the first one always stays.
    before = torch.cat([torch.zeros_like(reached[:, :1]), reached[:, :-1]], dim=-1)
    weights = weights.masked_fill(before >= limit, 0.0)
    return ids.gather(1, _invert(weights, rows).unsqueeze(1)).squeeze(1).tolist()


def _invert(weights: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Per row, the index that a uniform number picks from unnormalised weights: int64 [R]."""
    numbers = uniform(
        np.array([row.seed for row in rows], dtype=np.uint64),
        np.array([row.index for row in rows], dtype=np.uint64),
    )
    reached = torch.cumsum(weights, dim=-1)
    total = reached[:, -1:].contiguous()
    point = torch.from_numpy(numbers).unsqueeze(1) * total
    index = torch.searchsorted(reached, point, right=True)
    # Rounding may put the point at the very end: then the last token of any weight is meant.
    last = torch.searchsorted(reached, total, right=False)
    return torch.minimum(index, last).squeeze(1)
