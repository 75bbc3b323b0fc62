"""Weight formats on the GPU: the functions of each, by the format's name.

See `tiles` and `units` for what `tile` and `dot` do. Kernels take them as a `tl.constexpr`, chosen
at load.
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

    `tile` takes a BLOCK_K that is a power of two from `least_block_k` to `most_block_k`; `block_k`
    is what a matrix product on tensor cores should take. `dot` takes a power of two from
    `unit` on, the columns that it adds up at once. `scale_rows` rows share a row of scales.
    `exact`: dense products of many tokens are computed in float32, as such weights deserve, and not
    in bfloat16. `reads_fp8`: the weights are made for activations that are rounded to FP8 first.
    """

    tile: JITFunction
    dot: JITFunction
    least_block_k: int
    unit: int
    block_k: int = 64
    most_block_k: int = 4096
    scale_rows: int = 1
    exact: bool = False
    reads_fp8: bool = False


TRITON_FORMATS: dict[str, TritonFormat] = {
    "BF16": TritonFormat(bf16.tile, bf16.dot, 16, 8),
    "F16": TritonFormat(f16.tile, f16.dot, 16, 8),
    "F32": TritonFormat(f32.tile, f32.dot, 16, 4, exact=True),
    "Q8_0": TritonFormat(q8_0.tile, q8_0.dot, 32, 16),
    "Q4_0": TritonFormat(q4_0.tile, q4_0.dot, 32, 32),
    "Q4_1": TritonFormat(q4_1.tile, q4_1.dot, 32, 32),
    "Q4_K": TritonFormat(q4_k.tile, q4_k.dot, 64, 32),
    "Q5_K": TritonFormat(q5_k.tile, q5_k.dot, 64, 32),
    "Q6_K": TritonFormat(q6_k.tile, q6_k.dot, 128, 64, block_k=128),
    "MXFP4": TritonFormat(mxfp4.tile, mxfp4.dot, 32, 32),
    "MXFP4_PAIRS": TritonFormat(mxfp4.pairs_tile, mxfp4.pairs_dot, 32, 32),
    "NVFP4": TritonFormat(nvfp4.tile, nvfp4.dot, 16, 32),
    "NVFP4_PAIRS": TritonFormat(nvfp4.pairs_tile, nvfp4.pairs_dot, 16, 32),
    "DS_FP4": TritonFormat(mxfp4.pairs_tile, mxfp4.pairs_dot, 32, 32, reads_fp8=True),
    "FP8_128": TritonFormat(fp8_128.tile, fp8_128.dot, 16, 16, most_block_k=128, scale_rows=128),
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
