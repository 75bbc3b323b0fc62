"""The tables of `gpu_hybrid.py`, and the lines that are judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from machine import describe_line, markdown_table

HANDSHAKE_BAR_US = 10.0
KERNEL_BAR = 0.70
LARGE_READ_MB = 200.0
FLOOR_BAR = 2.0
# int8 activations on the CPU beside float32 ones on the GPU, in one layer, of the largest number.
CPU_DIFFERENCE_BAR = 0.03

Figures = dict[str, Any]


def report(figures: Figures) -> str:
    """Markdown. Also puts the judgements into `figures["verdict"]`."""
    figures["handshake_us_per_layer"] = handshake_costs(figures)
    figures["verdict"] = [
        {"line": line, "holds": holds, "seen": seen} for line, holds, seen in judge(figures)
    ]
    sections: list[tuple[str, Callable[[Figures], str]]] = [
        ("Judged", _verdict),
        ("Bandwidths, GB/s", _bandwidths),
        ("Decode, tokens per second of the layers' MoE part", _decode),
        ("Decode by fetch cap, tokens per second of hybrid", _caps),
        ("Graph against eager, microseconds of a step", _graphs),
        ("Handshake, microseconds per layer", _handshakes),
        ("Expert kernels, everything resident", _kernels),
        ("Prefill of the layers' MoE part", _prefill),
        ("Largest difference from fused, of its largest result", _differences),
        ("What went wrong", _troubles),
    ]
    bodies = ((title, table(figures)) for title, table in sections)
    text = "\n".join(f"### {title}\n\n{body}\n" for title, body in bodies if body)
    return f"{_headline(figures)}\n\n{text}"


def _headline(figures: Figures) -> str:
    mechanisms = "; ".join(
        f"{f['name']} {'works in graphs' if f['graph'] else f['reason']}"
        for f in figures["handshakes"]
    )
    return (
        f"{describe_line(figures['machine'])}; {figures['gpu']}, torch {figures['torch']}, "
        f"{figures['threads']} CPU threads ({figures['cpu_kernels']}); {figures['layers']} layers; "
        f"handshake: {mechanisms or 'none'}"
    )


# ---- what is judged --------------------------------------------------------------------------


def judge(figures: Figures) -> Iterator[tuple[str, bool | None, str]]:
    """Line, whether it holds (None: nothing was measured), and the worst that was seen."""
    cells = figures["cells"]
    yield _over_cells(
        "hybrid is at least as fast as the better of offload and cpu", cells, _against_best
    )
    yield _over_cells(
        "overlapped beats serialised where the CPU has work", _divided(cells), _against_serialised
    )
    yield _over_cells("a graph beats eager", cells, _against_eager)
    costs = figures["handshake_us_per_layer"]
    worst = max((cost["us"] for cost in costs), default=None)
    yield (
        f"a handshake takes at most {HANDSHAKE_BAR_US:g} us per layer",
        None if worst is None else worst <= HANDSHAKE_BAR_US,
        "" if worst is None else f"at most {worst:.1f} us",
    )
    large = [k for k in figures["kernels"] if k["mb_per_layer"] >= LARGE_READ_MB]
    yield _lowest(
        f"kernels reach {KERNEL_BAR:.0%} of the read bandwidth where a call reads "
        f"{LARGE_READ_MB:g} MB or more",
        [(k["fraction"], f"{k['model']}, batch {k['tokens']}") for k in large],
        KERNEL_BAR,
    )
    single = [k for k in figures["kernels"] if k["tokens"] == 1]
    yield _lowest(
        f"at batch 1 kernels take at most {FLOOR_BAR:g} times the time of reading their weights",
        [(k["fraction"], k["model"]) for k in single],
        1 / FLOOR_BAR,
    )
    found = [
        (difference, f"{_cell_name(cell)}, {side}")
        for cell in cells
        for side, difference in cell["difference"].items()
    ]
    holds = all(difference <= CPU_DIFFERENCE_BAR for difference, _ in found)  # not for NaN
    difference, where = max(found, default=(0.0, ""), key=lambda x: (x[0] != x[0], x[0]))
    yield (
        f"all strategies agree within {CPU_DIFFERENCE_BAR:g}",
        holds if found else None,
        f"{difference:.2g} ({where})" if found else "",
    )


Ratio = Callable[[Figures], float]


def _over_cells(line: str, cells: Iterable[Figures], ratio: Ratio) -> tuple[str, bool | None, str]:
    return _lowest(line, [(ratio(cell), _cell_name(cell)) for cell in cells], 1.0)


def _lowest(
    line: str, found: Sequence[tuple[float, str]], bar: float
) -> tuple[str, bool | None, str]:
    if not found:
        return line, None, ""
    missed = [name for ratio, name in found if not ratio >= bar]
    lowest, name = min(found)
    seen = f"lowest {lowest:.2f} ({name})"
    if missed:
        seen += f"; missed in {len(missed)} of {len(found)}: {'; '.join(missed)}"
    return line, not missed, seen


def _divided(cells: Iterable[Figures]) -> list[Figures]:
    """Cells in which the CPU had something to do: the others have nothing to overlap."""
    return [c for c in cells if c["best_cap"] != "all" and c["slots"] < c["experts"]]


def _against_best(cell: Figures) -> float:
    us = cell["step_us"]
    return min(us["offload"], us["cpu"]) / us["hybrid"]


def _against_serialised(cell: Figures) -> float:
    return cell["step_us"]["hybrid serialised"] / cell["step_us"]["hybrid"]


def _against_eager(cell: Figures) -> float:
    return cell["step_us"]["hybrid eager"] / cell["step_us"]["hybrid"]


def handshake_costs(figures: Figures) -> list[dict[str, Any]]:
    """Where everything is resident: a step of hybrid less one of fused, by layer. That is the
    cache's bookkeeping, the copies to and from pinned memory and the waits, with nothing to do."""
    return [
        {
            "model": cell["model"],
            "tokens": cell["tokens"],
            "us": (cell["step_us"]["hybrid"] - cell["step_us"]["fused"]) / figures["layers"],
        }
        for cell in figures["cells"]
        if cell["slots"] == cell["experts"]
    ]


# ---- tables ----------------------------------------------------------------------------------


def _cell_name(cell: Figures) -> str:
    return f"{cell['model']}, {cell['slots']} of {cell['experts']} slots, batch {cell['tokens']}"


def _speed(cell: Figures, step_us: float) -> str:
    return f"{cell['tokens'] / step_us * 1e6:.0f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _verdict(figures: Figures) -> str:
    words = {True: "yes", False: "NO", None: "not measured"}
    rows = [(v["line"], words[v["holds"]], v["seen"]) for v in figures["verdict"]]
    return markdown_table(("", "holds", "seen"), rows)


def _bandwidths(figures: Figures) -> str:
    rows = [(name, f"{value:.1f}") for name, value in figures["bandwidths"].items()]
    for model, speeds in figures["fetches"].items():
        rows += [
            (f"kernel that fetches {count} records, {model}", f"{speed:.1f}")
            for count, speed in speeds.items()
        ]
    return markdown_table(("", "GB/s"), rows) if rows else ""


def _decode(figures: Figures) -> str:
    rows = []
    for cell in figures["cells"]:
        us = cell["step_us"]
        names = ("fused", "offload", "cpu", "hybrid", "hybrid serialised", "hybrid eager")
        rows.append(
            (
                f"{cell['model']}, batch {cell['tokens']}",
                f"{cell['slots']}/{cell['experts']}",
                _percent(cell["hit_rate"]),
                *(_speed(cell, us[name]) for name in names),
                cell["best_cap"],
                f"{_against_best(cell):.2f}",
            )
        )
    header = (
        "model", "slots", "hits of offload", "fused", "offload", "cpu", "hybrid", "serialised",
        "hybrid eager", "chosen cap", "hybrid / best of both",
    )  # fmt: skip
    return markdown_table(header, rows) if rows else ""


def _caps(figures: Figures) -> str:
    rows = []
    for cell in figures["cells"]:
        speeds = [f"{cap}: {_speed(cell, us)}" for cap, us in cell["step_us_by_cap"].items()]
        rows.append((_cell_name(cell), ", ".join(speeds), _percent(cell["hybrid_hit_rate"])))
    header = ("", "cap: tok/s, to choose by", "hits at the chosen one, measured again")
    return markdown_table(header, rows) if rows else ""


def _graphs(figures: Figures) -> str:
    rows = []
    for cell in figures["cells"]:
        us = cell["step_us"]
        for name, eager in (
            ("fused", us["fused eager"]),
            ("cpu", us["cpu eager"]),
            ("offload", us.get("offload eager")),
            ("hybrid", us["hybrid eager"]),
        ):
            if eager is not None:
                rows.append(
                    (
                        f"{_cell_name(cell)}: {name}",
                        f"{us[name]:.0f}",
                        f"{eager:.0f}",
                        f"{eager / us[name]:.2f}",
                    )
                )
    return markdown_table(("", "graph", "eager", "eager / graph"), rows) if rows else ""


def _handshakes(figures: Figures) -> str:
    rows = [
        (f"{cost['model']}, batch {cost['tokens']}", f"{cost['us']:.1f}")
        for cost in figures["handshake_us_per_layer"]
    ]
    return markdown_table(("", "us"), rows) if rows else ""


def _kernels(figures: Figures) -> str:
    rows = [
        (
            f"{k['model']}, batch {k['tokens']}",
            f"{k['mb_per_layer']:.1f}",
            f"{k['layer_us']:.1f}",
            f"{k['floor_us']:.1f}",
            f"{k['gbps']:.0f}",
            f"{k['fraction']:.2f}",
        )
        for k in figures["kernels"]
    ]
    header = ("", "MB a layer", "us a layer", "floor, us", "GB/s", "of the read bandwidth")
    return markdown_table(header, rows) if rows else ""


def _prefill(figures: Figures) -> str:
    rows = [
        (
            f"{p['model']}, {p['strategy']}, {p['slots']} slots",
            p["tokens"],
            f"{p['ms']:.2f}",
            f"{p['tokens_per_s']:.0f}",
        )
        for p in figures["prefill"]
    ]
    return markdown_table(("", "tokens", "ms", "tok/s"), rows) if rows else ""


def _differences(figures: Figures) -> str:
    rows = [
        (f"{_cell_name(cell)}: {side}", f"{difference:.2g}")
        for cell in figures["cells"]
        for side, difference in cell["difference"].items()
    ]
    return markdown_table(("", "difference"), rows) if rows else ""


def _troubles(figures: Figures) -> str:
    lines = [f"- failed: {failure}" for failure in figures["failures"]]
    lines += [f"- not reached in time: {what}" for what in figures["not_reached"]]
    return "\n".join(lines)
