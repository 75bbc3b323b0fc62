"""The two kinds of step."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """A step is one or the other: expert strategies treat them differently."""

    PREFILL = "prefill"
    DECODE = "decode"
