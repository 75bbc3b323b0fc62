"""NVFP4 as GGUF has it: e2m1 codes, an e4m3 scale for each 16, a float32 factor for the tensor."""

from __future__ import annotations

import numpy as np

from freetoken.formats.base import Bytes, Float32
from freetoken.formats.scales import E4M3

_LARGEST = 6.0 * 448.0  # the largest code times the largest scale
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_BETWEEN = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_SCALES = E4M3[:0x7F].astype(np.float32)  # ascending: the signless ones, without NaN
_SCALES_BETWEEN = (_SCALES[1:] + _SCALES[:-1]) / 2


def tensor_factor(numbers: Float32) -> np.float32:
    """What the numbers are divided by, so that the largest takes the largest scale and code: the
    scales of usual weights would otherwise be among the few that lie near zero."""
    widest = float(np.abs(numbers).max(initial=0))
    factor = widest / _LARGEST if widest > 0 else 1.0
    return max(np.float32(factor), np.finfo(np.float32).tiny)  # not zero, nor of few bits


def quantize_nvfp4(numbers: Float32) -> Bytes:
    """Rows float32 [..., cols], divided by their factor -> uint8 [..., cols / 64 * 36].

    Of each sub-block the largest magnitude becomes 6 or 4, whichever leaves the smaller squared
    error: between 4 and 6 there is no code.
    """
    x = numbers.reshape(-1, 4, 16)
    widest = np.abs(x).max(axis=-1)
    best_scale, best_codes, best_error = _rounded(x, widest / np.float32(6))
    scale, codes, error = _rounded(x, widest / np.float32(4))
    better = error < best_error
    best_scale = np.where(better, scale, best_scale)
    best_codes = np.where(better[..., None], codes, best_codes)
    packed = best_codes[..., :8] | (best_codes[..., 8:] << 4)
    blocks = np.concatenate([best_scale, packed.reshape(-1, 32)], axis=1)
    return blocks.reshape(*numbers.shape[:-1], -1)


def _rounded(x: Float32, wanted: Float32) -> tuple[Bytes, Bytes, Float32]:
    """Scales as e4m3 [n, 4], codes [n, 4, 16] and the squared error [n, 4]."""
    stored: Bytes = np.searchsorted(_SCALES_BETWEEN, wanted).astype(np.uint8)
    scale = _SCALES[stored][..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        magnitude = np.where(scale == 0, np.float32(0), np.abs(x) / scale)
    codes: Bytes = np.searchsorted(_BETWEEN, magnitude).astype(np.uint8)
    codes |= np.signbit(x).astype(np.uint8) << np.uint8(3)
    error: Float32 = np.square(_MAGNITUDES[codes & 7] * scale - np.abs(x)).sum(axis=-1)
    return stored, codes, error
