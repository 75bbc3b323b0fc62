"""Measurements: the memory's read bandwidth, the expert kernels beside it, a whole model."""

from __future__ import annotations

from freetoken.bench.experts import (
    ExpertShape,
    ExpertsResult,
    check_blocks,
    formats_with_kernels,
    measure_experts,
    named_formats,
)
from freetoken.bench.memory import MemoryResult, measure_memory
from freetoken.bench.model import ModelResult, measure_model

__all__ = [
    "ExpertShape",
    "ExpertsResult",
    "MemoryResult",
    "ModelResult",
    "check_blocks",
    "formats_with_kernels",
    "measure_experts",
    "measure_memory",
    "measure_model",
    "named_formats",
]
