"""Float32 numbers to the blocks of a format: what `freetoken.formats` dequantises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from freetoken.convert.quantizers.k_quants import (
    LARGEST_BINARY16,
    quantize_q4_k,
    quantize_q5_k,
    quantize_q6_k,
)
from freetoken.convert.quantizers.nvfp4 import quantize_nvfp4, tensor_factor
from freetoken.formats.base import Bytes, Float32

_Quantize = Callable[[Float32], Bytes]


_PIECE_NUMBERS = 1 << 18  # quantised at a time: the temporary arrays are several times as large
# Magnitudes that the code for blocks takes for zeros, where it divided by scales that are zero or
# without exponent else. Nothing as small can be stored: binary16 scales end at 2^-24, and e8m0 ones
# so near that the numbers are lost among those of any other size.
_NOTHING = np.float32(2.0**-120)
_BINARY16_END = 65520.0  # rounds to infinity
# Where a format's reach ends: the first magnitude that it, or the scale or minimum of a block that
# has it, rounds to infinity, or for the K formats has to be cut off at.
_TOO_LARGE = {
    "F32": np.inf,
    "F16": _BINARY16_END,
    "BF16": (2 - 2.0**-8) * 2.0**127,
    "Q8_0": 127 * _BINARY16_END,
    "Q4_0": 8 * _BINARY16_END,
    "Q4_1": _BINARY16_END,  # of the minimum, which is no multiple of a scale
    "Q4_K": 63 * LARGEST_BINARY16,  # of the minimum, too
    "Q5_K": 63 * LARGEST_BINARY16,
    "Q6_K": 32 * 128 * LARGEST_BINARY16,
    "MXFP4": np.inf,
    "NVFP4": np.inf,
}


def _plain(dtype: str) -> _Quantize:
    def store(numbers: Float32) -> Bytes:
        stored: npt.NDArray[Any] = np.ascontiguousarray(numbers.astype(dtype))
        return stored.view(np.uint8)

    return store


def _blocks(name: str) -> _Quantize:
    by_gguf = _by_gguf(name)

    def store(numbers: Float32) -> Bytes:
        with np.errstate(over="ignore"):  # MXFP4 measures the distance to numbers that are too far
            return by_gguf(np.where(np.abs(numbers) < _NOTHING, np.float32(0), numbers))

    return store


def _by_gguf(name: str) -> _Quantize:
    return partial(gguf.quants.quantize, qtype=gguf.GGMLQuantizationType[name])


_QUANTIZERS: dict[str, _Quantize] = {
    "F32": _plain("<f4"),
    "F16": _plain("<f2"),
    "BF16": _by_gguf("BF16"),
    "Q8_0": _blocks("Q8_0"),
    "Q4_0": _blocks("Q4_0"),
    "Q4_1": _blocks("Q4_1"),
    "MXFP4": _blocks("MXFP4"),
    "Q4_K": quantize_q4_k,
    "Q5_K": quantize_q5_k,
    "Q6_K": quantize_q6_k,
    "NVFP4": quantize_nvfp4,
}
QUANTIZABLE = tuple(_QUANTIZERS)
"""Names of the formats that `quantize` writes: all that GGUF files can hold."""


def quantize(numbers: Float32, format_name: str) -> Bytes:
    """Rows float32 [..., cols] -> uint8 [..., row bytes]; cols must be whole blocks, and the
    magnitudes finite and below `too_large`.

    NVFP4: the numbers have been divided by their `tensor_factor`.
    """
    store = _QUANTIZERS[format_name]
    rows = np.ascontiguousarray(numbers, np.float32).reshape(-1, numbers.shape[-1])
    step = max(1, _PIECE_NUMBERS // max(1, rows.shape[1]))
    if len(rows) <= step:
        return store(rows).reshape(*numbers.shape[:-1], -1)
    first = store(rows[:step])
    packed = np.empty((len(rows), first.shape[1]), np.uint8)
    packed[:step] = first
    for at in range(step, len(rows), step):
        packed[at : at + step] = store(rows[at : at + step])
    return packed.reshape(*numbers.shape[:-1], -1)


def too_large(format_name: str) -> float:
    """The magnitude from which on a format holds no numbers."""
    return _TOO_LARGE[format_name]


__all__ = ["QUANTIZABLE", "quantize", "tensor_factor", "too_large"]
