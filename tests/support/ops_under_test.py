"""The implementations of Ops that model tests run on."""

from __future__ import annotations

from functools import cache
from typing import Any

from support.reference_ops import ReferenceOps

OPS = ("reference", "cpu")


@cache
def make_ops(name: str) -> Any:
    """ "reference" and "cpu-exact" multiply quantised weights exactly; "reference-int8" and "cpu"
    round the activations to int8 blocks first. One worker pool of each kind serves all tests."""
    if name.startswith("cpu"):
        from freetoken.kernels.cpu import CpuOps

        return CpuOps(threads=2, activations="exact" if name == "cpu-exact" else "int8")
    return ReferenceOps(int8_activations=name == "reference-int8")
