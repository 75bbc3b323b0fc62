"""The report after a run: tokens, speed, and where the experts were found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from freetoken.telemetry import Stats

    _Row = tuple[str, Callable[[Stats], str]]


def table(runs: Mapping[str, Stats]) -> Table:
    """One column per run, named by the mapping's keys."""
    out = Table(title="What it took", title_justify="left", title_style="bold")
    out.add_column("")
    for name in runs:
        out.add_column(name, justify="right")
    for label, cell in _ROWS:
        out.add_row(label, *(cell(stats) for stats in runs.values()))
    if any(stats.experts.active for stats in runs.values()):
        out.add_section()
        for label, cell in _EXPERT_ROWS:
            out.add_row(label, *(cell(stats) for stats in runs.values()))
    return out


def _generated_tokens(stats: Stats) -> int:
    """Of one completion: the first token comes out of the prefill, the others of decode steps."""
    return stats.timing.decode_tokens + (stats.timing.prefill_tokens > 0)


def _share(count: int, stats: Stats) -> str:
    if not stats.experts.active:
        return "-"
    return f"{count:,} ({100 * count / stats.experts.active:.0f}%)"


_ROWS: tuple[_Row, ...] = (
    ("load", lambda s: f"{s.timing.load_s:.2f} s"),
    ("prompt", lambda s: f"{s.timing.prefill_tokens} tokens"),
    ("generated", lambda s: f"{_generated_tokens(s)} tokens"),
    ("prefill", lambda s: f"{s.timing.prefill_tokens_per_s:.1f} tokens/s"),
    ("decode", lambda s: f"{s.timing.decode_tokens_per_s:.1f} tokens/s"),
)
_EXPERT_ROWS: tuple[_Row, ...] = (
    ("experts used in decode", lambda s: f"{s.experts.active:,}"),
    ("  found in the cache", lambda s: _share(s.experts.hits, s)),
    ("  fetched into it", lambda s: _share(s.experts.fetched, s)),
    ("  computed on the CPU", lambda s: _share(s.experts.cpu, s)),
)
