"""Counting what became of the experts that the router asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.telemetry import ExpertCounts

_FEW_IDS = 64


@dataclass(frozen=True)
class MoeStats:
    """Decode counts of each MoE layer and of the model, and prefill counts of the model."""

    total: ExpertCounts
    layers: tuple[ExpertCounts, ...]
    prefill: ExpertCounts


def total_counts(layers: Iterable[ExpertCounts]) -> ExpertCounts:
    """Sum over layers, where `steps` are steps of the model: every layer runs once in each."""
    counts = tuple(layers)
    return ExpertCounts(
        steps=max((c.steps for c in counts), default=0),
        active=sum(c.active for c in counts),
        hits=sum(c.hits for c in counts),
        misses=sum(c.misses for c in counts),
        fetched=sum(c.fetched for c in counts),
        cpu=sum(c.cpu for c in counts),
    )


class StepCounter(Protocol):
    """Running counts of each layer."""

    def add_routes(self, layer_id: int, topk_ids: Tensor, experts: int, *, on_cpu: bool) -> None:
        """Add one step whose ids [T, K] all found their experts in slots, or all on the CPU."""
        ...

    def layers(self) -> tuple[ExpertCounts, ...]:
        """Counts of every layer since the last reset."""
        ...

    def reset(self) -> None:
        """Start again from zero."""
        ...


class ExpertCounter:
    """Running counts of `layers` layers. Plain integers: it is called once per layer and step."""

    def __init__(self, layers: int) -> None:
        self._rows = [[0, 0, 0, 0] for _ in range(layers)]

    def add(self, layer_id: int, *, hits: int, fetched: int, cpu: int, steps: int = 1) -> None:
        """Add one step (or, with steps=0, a further wave of it)."""
        row = self._rows[layer_id]
        row[0] += steps
        row[1] += hits
        row[2] += fetched
        row[3] += cpu

    def add_routes(self, layer_id: int, topk_ids: Tensor, experts: int, *, on_cpu: bool) -> None:
        """Add one step whose ids [T, K] all found their experts in slots, or all on the CPU. Reads
        the ids on the host."""
        active = count_active(topk_ids.cpu().numpy(), experts)
        self.add(layer_id, hits=0 if on_cpu else active, fetched=0, cpu=active if on_cpu else 0)

    def layer(self, layer_id: int) -> ExpertCounts:
        """Counts of one layer since the last reset."""
        return _counts(self._rows[layer_id])

    def layers(self) -> tuple[ExpertCounts, ...]:
        """Counts of every layer since the last reset."""
        return tuple(self.layer(layer_id) for layer_id in range(len(self._rows)))

    def reset(self) -> None:
        """Start again from zero."""
        self._rows = [[0, 0, 0, 0] for _ in self._rows]


class DeviceExpertCounter:
    """Running counts on a device. Adding reads nothing on the host, so that graphs can hold it."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self._rows = torch.zeros(layers, 4, dtype=torch.int64, device=device)

    def row(self, layer_id: int) -> Tensor:
        """A layer's counts, int64 [4]: steps, hits, fetched, computed on the CPU. To be added to
        on the device."""
        return self._rows[layer_id]

    def add_routes(self, layer_id: int, topk_ids: Tensor, experts: int, *, on_cpu: bool) -> None:
        """Add one step whose ids [T, K] all found their experts in slots, or all on the CPU."""
        row = self._rows[layer_id]
        row[0] += 1
        row[3 if on_cpu else 1] += mark_active(topk_ids, experts).sum()

    def layers(self) -> tuple[ExpertCounts, ...]:
        """Counts of every layer since the last reset. Reads them from the device."""
        return tuple(_counts(row) for row in self._rows.tolist())

    def reset(self) -> None:
        """Start again from zero."""
        self._rows.zero_()


def _counts(row: Sequence[int]) -> ExpertCounts:
    steps, hits, fetched, cpu = row
    misses = fetched + cpu
    return ExpertCounts(steps, hits + misses, hits, misses, fetched, cpu)


def mark_active(topk_ids: Tensor, experts: int) -> Tensor:
    """int32 [experts], on the device of ids [T, K]: 1 for each expert among them, else 0."""
    marks = torch.zeros(experts + 1, dtype=torch.int32, device=topk_ids.device)
    spare = topk_ids.reshape(-1).long().where(topk_ids.reshape(-1) >= 0, experts)
    return marks.scatter_(0, spare, 1)[:experts]


def count_active(topk_ids: npt.NDArray[np.int32], experts: int) -> int:
    """Distinct experts among ids [T, K]; -1 is a padded row's and counts for nothing."""
    if topk_ids.size <= _FEW_IDS:  # a decode step: a set of integers takes a microsecond
        return len({*topk_ids.reshape(-1).tolist()} - {-1})
    asked = np.zeros(experts + 1, dtype=np.bool_)
    asked[topk_ids] = True  # -1 is the last entry, which nobody looks at
    return int(np.count_nonzero(asked[:experts]))
