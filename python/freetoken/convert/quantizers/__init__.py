"""Float32 numbers to the blocks of a format: what `freetoken.formats` dequantises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from freetoken.convert.quantizers.k_quants import quantize_q4_k, quantize_q5_k, quantize_q6_k
from freetoken.convert.quantizers.nvfp4 import quantize_nvfp4, tensor_factor
from freetoken.formats.base import Bytes, Float32

_Quantize = Callable[[Float32], Bytes]


def _plain(dtype: str) -> _Quantize:
    def store(numbers: Float32) -> Bytes:
        with np.errstate(over="ignore"):  # the caller looks for infinities
            stored: npt.NDArray[Any] = np.ascontiguousarray(numbers.astype(dtype))
        return stored.view(np.uint8)

    return store


def _by_gguf(name: str) -> _Quantize:
    return partial(gguf.quants.quantize, qtype=gguf.GGMLQuantizationType[name])


_QUANTIZERS: dict[str, _Quantize] = {
    "F32": _plain("<f4"),
    "F16": _plain("<f2"),
    "BF16": _by_gguf("BF16"),
    "Q8_0": _by_gguf("Q8_0"),
    "Q4_0": _by_gguf("Q4_0"),
    "Q4_1": _by_gguf("Q4_1"),
    "MXFP4": _by_gguf("MXFP4"),
    "Q4_K": quantize_q4_k,
    "Q5_K": quantize_q5_k,
    "Q6_K": quantize_q6_k,
    "NVFP4": quantize_nvfp4,
}
QUANTIZABLE = tuple(_QUANTIZERS)
"""Names of the formats that `quantize` writes: all that GGUF files can hold."""


def quantize(numbers: Float32, format_name: str) -> Bytes:
    """Rows float32 [..., cols] -> uint8 [..., row bytes]; cols must be whole blocks.

    NVFP4: the numbers have been divided by their `tensor_factor`.
    """
    return _QUANTIZERS[format_name](np.ascontiguousarray(numbers, np.float32))


__all__ = ["QUANTIZABLE", "quantize", "tensor_factor"]
