"""Kernels as data, for a test that compiles each of them for every GPU target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of a kernel.

    `signature` has the type of each argument that is no constant, by name ("*fp32", "i32"),
    `constants` the value of each `tl.constexpr`; `options` are num_warps, num_stages and the like.
    """

    name: str
    kernel: JITFunction
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    options: Mapping[str, int] = field(default_factory=dict)
