"""Weight formats: how numbers lie in bytes, one object and one file each."""

from __future__ import annotations

from freetoken.errors import CheckpointError
from freetoken.formats.base import ByteRange, PlanarFormat, WeightFormat
from freetoken.formats.bf16 import BF16
from freetoken.formats.f16 import F16
from freetoken.formats.f32 import F32
from freetoken.formats.fp8_128 import FP8_128
from freetoken.formats.mxfp4 import DS_FP4, MXFP4, MXFP4_PAIRS
from freetoken.formats.nvfp4 import NVFP4, NVFP4_PAIRS
from freetoken.formats.q4_0 import Q4_0
from freetoken.formats.q4_1 import Q4_1
from freetoken.formats.q4_k import Q4_K
from freetoken.formats.q5_k import Q5_K
from freetoken.formats.q6_k import Q6_K
from freetoken.formats.q8_0 import Q8_0

FORMATS: dict[str, WeightFormat] = {
    weight_format.name: weight_format
    for weight_format in (
        *(F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K),
        *(MXFP4, MXFP4_PAIRS, NVFP4, NVFP4_PAIRS, DS_FP4, FP8_128),
    )
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
    "DS_FP4",
    "F16",
    "F32",
    "FORMATS",
    "FP8_128",
    "MXFP4",
    "MXFP4_PAIRS",
    "NVFP4",
    "NVFP4_PAIRS",
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q8_0",
    "ByteRange",
    "PlanarFormat",
    "WeightFormat",
    "by_name",
]
