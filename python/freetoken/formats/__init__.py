"""Weight formats: how numbers lie in bytes, one object and one file each."""

from __future__ import annotations

from freetoken.errors import CheckpointError
from freetoken.formats.base import ByteRange, WeightFormat
from freetoken.formats.bf16 import BF16
from freetoken.formats.f16 import F16
from freetoken.formats.f32 import F32
from freetoken.formats.q4_0 import Q4_0
from freetoken.formats.q4_1 import Q4_1
from freetoken.formats.q8_0 import Q8_0

FORMATS: dict[str, WeightFormat] = {
    weight_format.name: weight_format for weight_format in (F32, F16, BF16, Q8_0, Q4_0, Q4_1)
}


def by_name(name: str) -> WeightFormat:
    """The format of that name. Raises CheckpointError that lists the supported ones."""
    if name not in FORMATS:
        raise CheckpointError(
            "unsupported weight format",
            found=name,
            expected=f"one of {', '.join(FORMATS)}",
            hint="convert the checkpoint to a supported format",
        )
    return FORMATS[name]


__all__ = [
    "BF16",
    "F16",
    "F32",
    "FORMATS",
    "Q4_0",
    "Q4_1",
    "Q8_0",
    "ByteRange",
    "WeightFormat",
    "by_name",
]
