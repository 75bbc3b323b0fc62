"""Weight formats on the GPU: the tile functions of each, by the format's name.

See `tiles` for what a tile function does. Kernels take it as a `tl.constexpr`, chosen at load.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.runtime.jit import JITFunction

from freetoken.errors import CheckpointError
from freetoken.formats.base import WeightFormat
from freetoken.kernels.triton.formats import (
    bf16,
    f16,
    f32,
    fp8_128,
    mxfp4,
    nvfp4,
    q4_0,
    q4_1,
    q4_k,
    q5_k,
    q6_k,
    q8_0,
)


@dataclass(frozen=True)
class TritonFormat:
    """How kernels read a format.

    `tile` takes a BLOCK_K that is a power of two from `least_block_k` to `most_block_k`;
    `block_k` is what a matrix product on tensor cores should take.
    """

    tile: JITFunction
    least_block_k: int
    block_k: int = 64
    most_block_k: int = 4096


TRITON_FORMATS: dict[str, TritonFormat] = {
    "BF16": TritonFormat(bf16.tile, 16),
    "F16": TritonFormat(f16.tile, 16),
    "F32": TritonFormat(f32.tile, 16),
    "Q8_0": TritonFormat(q8_0.tile, 32),
    "Q4_0": TritonFormat(q4_0.tile, 32),
    "Q4_1": TritonFormat(q4_1.tile, 32),
    "Q4_K": TritonFormat(q4_k.tile, 64),
    "Q5_K": TritonFormat(q5_k.tile, 64),
    "Q6_K": TritonFormat(q6_k.tile, 128, block_k=128),
    "MXFP4": TritonFormat(mxfp4.tile, 32),
    "MXFP4_PAIRS": TritonFormat(mxfp4.pairs_tile, 32),
    "NVFP4": TritonFormat(nvfp4.tile, 16),
    "NVFP4_PAIRS": TritonFormat(nvfp4.pairs_tile, 16),
    "DS_FP4": TritonFormat(mxfp4.pairs_tile, 32),
    "FP8_128": TritonFormat(fp8_128.tile, 16, most_block_k=128),
}


def triton_format(weight_format: WeightFormat) -> TritonFormat:
    """How kernels read this format. Raises CheckpointError for one without GPU kernels."""
    if weight_format.name not in TRITON_FORMATS:
        raise CheckpointError(
            "no GPU kernel for this weight format",
            found=weight_format.name,
            expected=f"one of {', '.join(TRITON_FORMATS)}",
            hint="convert the checkpoint to one of them, or run with --device cpu",
        )
    return TRITON_FORMATS[weight_format.name]


__all__ = ["TRITON_FORMATS", "TritonFormat", "triton_format"]
