"""Attention over the paged cache against the reference, its two kernels each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from freetoken.kernels.triton.ops import TritonOps
from support.operator_cases import bfloat16_error, close, numbers, same_product
from support.reference_ops import ReferenceOps

PAGE_TOKENS = 16
LENGTHS = (37, 290)
REFERENCE = ReferenceOps()
HEADS = [(9, 3, 64), (2, 2, 40), (4, 1, 128)]


@dataclass
class Case:
    """Two sequences in a cache whose other rows are NaN, and some of their tokens."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table: torch.Tensor
    sequence: torch.Tensor
    positions: torch.Tensor
    options: dict[str, Any]

    def ours(self, device: str, rows: slice = slice(None)) -> torch.Tensor:
        """The Triton kernels' result for some of the rows."""
        arguments = (
            self.q[rows],
            self.k_cache,
            self.v_cache,
            self.table,
            self.sequence[rows],
            self.positions[rows],
        )
        sinks = self.options["sinks"]
        options = {**self.options, "sinks": None if sinks is None else sinks.to(device)}
        on_device = [x.clone().to(device) for x in arguments]
        return TritonOps(device).paged_attention(*on_device, **options).cpu()

    def expected(self) -> torch.Tensor:
        return REFERENCE.paged_attention(
            self.q,
            self.k_cache.float(),
            self.v_cache.float(),
            self.table,
            self.sequence,
            self.positions,
            **self.options,
        )


def make_case(
    heads: tuple[int, int, int],
    tokens: list[tuple[int, int]],
    *,
    window: int | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
    sequences: int = 2,
) -> Case:
    """`tokens` are pairs of sequence and position; sequence -1 is padding."""
    q_heads, kv_heads, dim = heads
    pages = torch.randperm(40, generator=torch.Generator().manual_seed(7))[:38].int() + 1
    table = torch.zeros(sequences, 19, dtype=torch.int32)
    table[:2] = pages.view(2, 19)
    caches = []
    for seed in (8, 18):
        cache = torch.full((41 * PAGE_TOKENS, kv_heads, dim), float("nan"))
        for row, length in enumerate(LENGTHS):
            at = torch.arange(length)
            slots = table[row].long()[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
            cache[slots] = numbers(length, kv_heads, dim, seed=seed + row)
        caches.append(cache.view(41, PAGE_TOKENS, kv_heads, dim).to(dtype))
    return Case(
        q=numbers(len(tokens), q_heads, dim, seed=30),
        k_cache=caches[0],
        v_cache=caches[1],
        table=table,
        sequence=torch.tensor([s for s, _ in tokens], dtype=torch.int32),
        positions=torch.tensor([p for _, p in tokens], dtype=torch.int32),
        options={
            "scale": dim**-0.5,
            "window": window,
            "sinks": numbers(q_heads, seed=31, scale=2) if sinks else None,
        },
    )


PREFILL = [*((0, p) for p in range(37)), (1, 0), (1, 289), (-1, 5), (1, 256)]


@pytest.mark.parametrize(
    ("window", "sinks"), [(None, False), (None, True), (1, True), (17, False), (300, True)]
)
@pytest.mark.parametrize("heads", HEADS)
def test_prefill(device: str, heads: tuple[int, int, int], window: int | None, sinks: bool) -> None:
    case = make_case(heads, PREFILL, window=window, sinks=sinks)
    found = case.ours(device)
    close(found, case.expected(), 5e-6)
    assert torch.equal(found[39], torch.zeros(heads[0], heads[2]))
    part = case.ours(device, slice(10, 39))  # the tokens lie in other tiles now
    same_product(part, found[10:39], device)


DECODE = [(1, 289), (0, 36), (-1, 5), (1, 0), (0, 16)]


@pytest.mark.parametrize(
    ("window", "sinks"), [(None, False), (None, True), (1, True), (17, False), (300, True)]
)
@pytest.mark.parametrize("heads", HEADS)
def test_decode(device: str, heads: tuple[int, int, int], window: int | None, sinks: bool) -> None:
    case = make_case(heads, DECODE, window=window, sinks=sinks, sequences=len(DECODE))
    found = case.ours(device)
    close(found, case.expected(), 5e-6)
    assert torch.equal(found[2], torch.zeros(heads[0], heads[2]))
    for t in (0, 4):
        same_product(case.ours(device, slice(t, t + 1))[0], found[t], device)


@pytest.mark.parametrize("tokens", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("heads", [(9, 3, 64), (2, 1, 256)])
def test_a_bfloat16_cache(
    device: str, heads: tuple[int, int, int], tokens: list[tuple[int, int]]
) -> None:
    """Queries are rounded to bfloat16, so a score is off by at most e = 2^-9 scale sum |q| |k|; a
    share by e^(2 e), and by 2^-9 again where it is rounded itself."""
    case = make_case(heads, tokens, window=40, sinks=True, dtype=torch.bfloat16, sequences=5)
    found, expected = case.ours(device), case.expected()
    keys = case.k_cache.float().nan_to_num().abs().view(-1, *case.k_cache.shape[2:])
    group = heads[0] // heads[1]
    scores = torch.einsum("thd,phd->thp", case.q.abs(), keys.repeat_interleave(group, dim=1))
    rounding = bfloat16_error(device)
    error = rounding * case.options["scale"] * scores.max()
    values = case.v_cache.float().nan_to_num().abs().max()
    bound = ((2 * error).exp() - 1 + rounding + 1e-5) * values
    assert bound < 0.5 * expected.abs().max(), "the bound says something"
    torch.testing.assert_close(found, expected, rtol=0, atol=float(bound))
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("tokens", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_what_is_no_number_is_seen_and_stays_in_its_sequence(
    device: str, tokens: list[tuple[int, int]]
) -> None:
    case = make_case((9, 3, 64), tokens, sequences=len(DECODE) if tokens is DECODE else 2)
    slot = case.table[1, 0]
    case.k_cache[slot, 0, 1, 3] = float("nan")  # position 0 of sequence 1, key head 1
    found = case.ours(device)
    in_sequence = case.sequence == 1
    assert found[in_sequence][:, 3:6].isnan().all()
    assert found[in_sequence][:, [0, 1, 2, 6, 7, 8]].isfinite().all()
    assert found[~in_sequence].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_a_value_that_is_no_number_reaches_those_who_see_it_alone(
    device: str, tokens: list[tuple[int, int]], value: float
) -> None:
    """Neither earlier tokens of its sequence nor other sequences, in whatever tile they lie."""
    heads = (9, 3, 64)
    case = make_case(heads, tokens, sequences=len(DECODE) if tokens is DECODE else 2)
    whole = case.ours(device)
    at = 200
    page = case.table[1, at // PAGE_TOKENS]
    case.v_cache[page, at % PAGE_TOKENS, 1, 3] = value
    found = case.ours(device)
    sees = (case.sequence == 1) & (case.positions >= at)
    assert 0 < sees.sum() < (case.sequence == 1).sum()
    assert not found[sees][:, 3:6].isfinite().all(dim=-1).any()
    others = found.clone()
    others[sees, 3:6] = whole[sees, 3:6]
    close(others, whole, 5e-6)


def test_many_sequences_in_one_tile_of_a_prefill(device: str) -> None:
    tokens = [(1, 200), (0, 3), (1, 201), (-1, 0), (0, 4), (1, 5)]
    case = make_case((4, 1, 16), tokens, window=6)
    close(case.ours(device), case.expected(), 5e-6)
