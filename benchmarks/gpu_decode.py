"""Decode steps of MoE layers by every strategy over one runtime, in rounds that alternate.

A step is one `decode` of every layer on standing tensors, and ends when the device is idle, as the
step of an engine does, which looks at the token. Before it, the ids of the trace's next step are
copied in, and in it each layer's result is rounded to float32, as a model's layer does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gpu_device import Device
from gpu_models import Geometry, routes_with_locality

from freetoken.moe.lru import UNLIMITED
from freetoken.moe.runtime import OffloadMoeRuntime
from freetoken.moe.strategies import STRATEGIES, ExpertStrategy
from freetoken.platforms.graphs import Graph


@dataclass(frozen=True)
class Effort:
    """How long to measure. A round of one side takes `round_s` or `most_steps`, after `settle`
    steps that are not counted; `trace_steps` before a trace begins again."""

    rounds: int = 4
    round_s: float = 0.04
    least_steps: int = 5
    most_steps: int = 40
    settle: int = 3
    trace_steps: int = 48


@dataclass
class Strategies:
    """The strategies that a hybrid runtime has all parts of, and fused beside them."""

    hybrid: OffloadMoeRuntime
    fused: OffloadMoeRuntime
    by_name: dict[str, ExpertStrategy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, runtime in (
            ("fused", self.fused),
            ("offload", self.hybrid),
            ("cpu", self.hybrid),
            ("hybrid", self.hybrid),
        ):
            strategy = self.by_name[name] = STRATEGIES[name](runtime)
            for layer_id in range(len(runtime.experts)):
                kernel = runtime.slot_kernel(layer_id)
                if name != "cpu" and kernel is not None:
                    strategy.register(layer_id, kernel)


@dataclass
class Side:
    """One way to compute a step. `handshakes` are in its graph; None: it runs eagerly."""

    name: str
    run: Callable[[], object]
    cap: int = UNLIMITED
    handshakes: int | None = None
    seconds: list[float] = field(default_factory=list)
    hits: int = 0
    active: int = 0

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds)


class Cell:
    """One model, one number of slots, one batch size: its inputs, its graphs and its clock."""

    def __init__(
        self,
        geometry: Geometry,
        strategies: Strategies,
        tokens: int,
        device: Device,
        effort: Effort,
    ) -> None:
        layers = len(strategies.hybrid.experts)
        trace = routes_with_locality(
            geometry, steps=effort.trace_steps, layers=layers, tokens=tokens
        )
        on = device.device
        self._device = device
        self._effort = effort
        self._strategies = strategies
        self._layers = layers
        self.tokens = tokens
        self._trace = torch.from_numpy(trace).to(on)
        self._at = 0
        self._ids = torch.empty_like(self._trace[0])
        generator = torch.Generator().manual_seed(tokens)
        self._hidden = torch.randn(tokens, geometry.hidden, generator=generator).to(on)
        rng = np.random.default_rng(tokens)
        shares = rng.dirichlet(np.ones(geometry.top_k), (layers, tokens)).astype(np.float32)
        self._weights = torch.from_numpy(shares).to(on)
        self.outs = torch.zeros(layers, tokens, geometry.hidden, device=on)
        self._graphs: list[Graph] = []

    def eager(self, strategy: str, *, cap: int = UNLIMITED, overlap: bool = True) -> Side:
        """A side that runs without a graph."""
        name = "hybrid serialised" if strategy == "hybrid" and not overlap else strategy
        hybrid = self._strategies.hybrid.hybrid
        step = self._step(strategy)

        def run() -> None:
            hybrid.overlap = overlap
            step()

        return Side(f"{name}, eager", run, cap)

    def captured(self, strategy: str, *, cap: int = UNLIMITED, overlap: bool = True) -> Side:
        """The same in a graph. Its shapes are run eagerly first."""
        eager = self.eager(strategy, cap=cap, overlap=overlap)
        self._prepare(eager)
        self._play(eager)
        self._ids.copy_(self._trace[0])
        graph = self._device.capture(eager.run)
        self._graphs.append(graph)
        handshakes = self._layers if strategy in ("cpu", "hybrid") else 0
        return Side(eager.name.removesuffix(", eager"), graph.replay, cap, handshakes)

    def with_cap(self, side: Side, cap: int) -> Side:
        """The same graph under another fetch cap."""
        return Side(side.name, side.run, cap, side.handshakes)

    def _step(self, strategy: str) -> Callable[[], None]:
        decode = self._strategies.by_name[strategy].decode

        def step() -> None:
            for layer_id in range(self._layers):
                out = decode(layer_id, self._hidden, self._weights[layer_id], self._ids[layer_id])
                self.outs[layer_id].copy_(out)

        return step

    def measure(self, sides: Sequence[Side]) -> None:
        """Add a time for each round to every side."""
        for _ in range(self._effort.rounds):
            for side in sides:
                self._round(side)

    def fill(self, side: Side) -> None:
        """Play the whole trace once, so that the slots hold what it asks for."""
        self._prepare(side)
        for _ in range(len(self._trace)):
            self._play(side)
        self._check()

    def output_at(self, side: Side, step: int) -> torch.Tensor:
        """float32 [layers, T, H], on the host, of the trace's step of that number."""
        self._prepare(side)
        self._at = step
        self.outs.fill_(float("nan"))
        self._play(side)
        self._check()
        return self.outs.cpu().clone()  # of a CPU's tensor .cpu() is no copy

    def close(self) -> None:
        """Let go of the graphs, before anything that they captured."""
        self._device.synchronize()
        for graph in self._graphs:
            graph.close()
        self._graphs.clear()

    def _round(self, side: Side) -> None:
        self._prepare(side)
        effort = self._effort
        for _ in range(effort.settle):
            self._play(side)
        self._strategies.hybrid.reset_stats()
        self._device.synchronize()
        start, steps = time.perf_counter(), 0
        while True:
            self._play(side)
            steps += 1
            seconds = time.perf_counter() - start
            if steps >= effort.most_steps or (
                seconds >= effort.round_s and steps >= effort.least_steps
            ):
                break
        side.seconds.append(seconds / steps)
        self._check()
        total = self._strategies.hybrid.stats().total
        side.hits += total.hits
        side.active += total.active

    def _prepare(self, side: Side) -> None:
        self._strategies.hybrid.cache.cap.set(side.cap)

    def _play(self, side: Side) -> None:
        self._ids.copy_(self._trace[self._at % len(self._trace)])
        self._at += 1
        if side.handshakes:
            self._strategies.hybrid.cpu.announce(side.handshakes)
        side.run()
        self._device.synchronize()

    def _check(self) -> None:
        self._strategies.hybrid.cpu.check()


def caps_for(geometry: Geometry, tokens: int) -> tuple[int, ...]:
    """Fetch caps to try: none, some, all misses."""
    most = min(geometry.experts, tokens * geometry.top_k)
    some = (1, 2) if tokens == 1 else (1, 4, 12)
    return (0, *(cap for cap in some if cap < most), UNLIMITED)


def cap_name(cap: int) -> str:
    return "all" if cap == UNLIMITED else str(cap)


def measure_cell(
    geometry: Geometry, strategies: Strategies, tokens: int, device: Device, effort: Effort
) -> dict[str, Any]:
    """All figures of one cell."""
    cell = Cell(geometry, strategies, tokens, device, effort)
    try:
        return _measure(cell, geometry, strategies, tokens)
    finally:
        cell.close()


def _measure(cell: Cell, geometry: Geometry, strategies: Strategies, tokens: int) -> dict[str, Any]:
    """First the fetch caps, against one another; then everything, with the cap that was best.

    The lowest of several times is lower than what that side takes, so no time of the first rounds
    is compared with another side's. Of the figures, "step_us_by_cap" are those of the first rounds,
    medians in microseconds; "best_cap" is the lowest of them. "step_us" by side, "rounds_us" (every
    round's time) and the hit rates are of the second ones, where "hybrid" has that cap. Sides with
    "eager" in the name have no graph; "hybrid serialised" waits for the CPU before the GPU begins.
    """
    slots = strategies.hybrid.slots
    fused, cpu = cell.captured("fused"), cell.captured("cpu")
    # With more routes than slots the host must look whether all experts fit: no graph.
    in_graph = tokens * geometry.top_k <= slots
    offload = cell.captured("offload") if in_graph else cell.eager("offload")
    overlapped = cell.captured("hybrid")
    serial = cell.captured("hybrid", overlap=False)
    cell.fill(overlapped)
    by_cap = [cell.with_cap(overlapped, cap) for cap in caps_for(geometry, tokens)]
    # The caps go upwards from what offload leaves in the slots.
    cell.measure([cell.with_cap(offload, offload.cap), *by_cap])
    cap = min(by_cap, key=lambda side: side.step_s).cap

    hybrid, serial = cell.with_cap(overlapped, cap), cell.with_cap(serial, cap)
    eager = [cell.eager(name) for name in ("fused", "cpu")]
    eager += [cell.eager("offload")] if in_graph else []
    eager += [cell.eager("hybrid", cap=cap)]
    sides = [offload, hybrid, cpu, serial, fused, *eager]
    cell.measure(sides)
    names = ["offload", *(side.name.replace(",", "") for side in sides[1:])]
    compared = [offload, cpu, *(cell.with_cap(overlapped, c) for c in (0, UNLIMITED)), serial]
    return {
        "model": geometry.name,
        "slots": slots,
        "experts": geometry.experts,
        "tokens": tokens,
        "offload_in_graph": in_graph,
        "hit_rate": offload.hits / offload.active if offload.active else None,
        "hybrid_hit_rate": hybrid.hits / hybrid.active if hybrid.active else None,
        "best_cap": cap_name(cap),
        "step_us_by_cap": {cap_name(side.cap): side.step_s * 1e6 for side in by_cap},
        "step_us": {name: side.step_s * 1e6 for name, side in zip(names, sides, strict=True)},
        "rounds_us": {
            name: [s * 1e6 for s in side.seconds]
            for name, side in zip(names[:3], sides[:3], strict=True)
        },
        "difference": differences(cell, fused, compared),
    }


def differences(cell: Cell, fused: Side, others: Sequence[Side]) -> dict[str, float]:
    """Largest difference of each side's results from those of fused, over the largest of these."""
    expected = cell.output_at(fused, 0)
    largest = expected.abs().max()
    return {
        f"{side.name}, cap {cap_name(side.cap)}" if "hybrid" in side.name else side.name: float(
            (cell.output_at(side, 0) - expected).abs().max() / largest
        )
        for side in others
    }
