"""Q4_K, Q5_K and Q6_K: scales of sub-blocks chosen for the least squared error.

For each sub-block several roundings are tried, each from a slightly different first scale; the
scale (and minimum) that fits a rounding best is found by least squares, and the best pair is kept.
The scales of a block are then rounded to 6 or 8 bits themselves, and the numbers are rounded anew
with what was stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from freetoken.formats.base import Bytes, Float32

_BLOCK = 256
LARGEST_BINARY16 = 65504.0
_STRETCHES = np.linspace(-1.0, 1.0, 9, dtype=np.float32)  # steps added to the largest code


def quantize_q4_k(numbers: Float32) -> Bytes:
    return _with_minimum(numbers, 15)


def quantize_q5_k(numbers: Float32) -> Bytes:
    return _with_minimum(numbers, 31)


def quantize_q6_k(numbers: Float32) -> Bytes:
    x = numbers.reshape(-1, 16, 16)
    scales = _fit_scale(x)
    widest = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], axis=1)
    d = _binary16(widest[:, 0] / np.float32(-128))
    step = d.astype(np.float32)[:, None]
    sub = np.clip(np.rint(_ratio(scales, step)), -128, 127).astype(np.int8)
    codes = np.rint(_ratio(x, (step * sub.astype(np.float32))[..., None]))
    codes = (np.clip(codes, -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = codes & 15
    low = low[:, :, :2] | (low[:, :, 2:] << 4)
    high = codes >> 4
    high = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    blocks = (
        low.reshape(-1, 128),
        high.reshape(-1, 64),
        sub.view(np.uint8),
        d.reshape(-1, 1).view(np.uint8),
    )
    return np.concatenate(blocks, axis=1).reshape(*numbers.shape[:-1], -1)


def _with_minimum(numbers: Float32, largest: int) -> Bytes:
    """Codes 0..largest: a number is code * scale - minimum, eight of each in a block."""
    x = numbers.reshape(-1, 8, 32)
    scales, minima = _fit_scale_and_minimum(x, largest)
    d = _binary16(scales.max(axis=1) / np.float32(63))
    d_min = _binary16(minima.max(axis=1) / np.float32(63))
    step, step_min = d.astype(np.float32)[:, None], d_min.astype(np.float32)[:, None]
    sub = np.clip(np.rint(_ratio(scales, step)), 0, 63).astype(np.uint8)
    sub_min = np.clip(np.rint(_ratio(minima, step_min)), 0, 63).astype(np.uint8)
    shifted = x + (step_min * sub_min.astype(np.float32))[..., None]
    codes = np.rint(_ratio(shifted, (step * sub.astype(np.float32))[..., None]))
    codes = np.clip(codes, 0, largest).astype(np.uint8)
    fields: list[npt.NDArray[Any]] = [
        d.reshape(-1, 1).view(np.uint8),
        d_min.reshape(-1, 1).view(np.uint8),
        _packed_scales(sub, sub_min),
    ]
    if largest > 15:
        fifth = (codes >> 4) << np.arange(8, dtype=np.uint8)[:, None]
        fields.append(np.bitwise_or.reduce(fifth, axis=1))
    pairs = (codes & 15).reshape(-1, 4, 2, 32)
    fields.append((pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128))
    return np.concatenate(fields, axis=1).reshape(*numbers.shape[:-1], -1)


def _binary16(values: Float32) -> npt.NDArray[np.float16]:
    """Finite: what was fitted may lie a little beyond the numbers that a block can hold."""
    return np.clip(values, -LARGEST_BINARY16, LARGEST_BINARY16).astype("<f2")


def _packed_scales(sub: Bytes, sub_min: Bytes) -> Bytes:
    """Eight 6-bit scales and eight 6-bit minima in 12 bytes."""
    first = sub[:, :4] | ((sub[:, 4:] >> 4) << 6)
    second = sub_min[:, :4] | ((sub_min[:, 4:] >> 4) << 6)
    third = (sub[:, 4:] & 15) | ((sub_min[:, 4:] & 15) << 4)
    return np.concatenate([first, second, third], axis=1)


def _fit_scale_and_minimum(x: Float32, largest: int) -> tuple[Float32, Float32]:
    """For each [..., n]: scale and minimum >= 0 with x near code * scale - minimum."""
    low = np.minimum(x.min(axis=-1), 0)
    span = x.max(axis=-1) - low
    n = np.float32(x.shape[-1])
    sum_x = x.sum(axis=-1)
    best_scale, best_minimum = span / np.float32(largest), -low
    best_error = np.full(span.shape, np.inf, np.float32)
    for stretch in _STRETCHES:
        codes = np.rint(_ratio((x - low[..., None]) * (largest + stretch), span[..., None]))
        codes = np.clip(codes, 0, largest)
        sum_c, sum_cc = codes.sum(axis=-1), (codes * codes).sum(axis=-1)
        sum_cx = (codes * x).sum(axis=-1)
        scale = _ratio(n * sum_cx - sum_c * sum_x, n * sum_cc - sum_c * sum_c)
        minimum = (scale * sum_c - sum_x) / n
        # A minimum below zero cannot be stored: the scale that is best without one.
        negative = minimum < 0
        scale = np.where(negative, _ratio(sum_cx, sum_cc), scale)
        minimum = np.where(negative, np.float32(0), minimum)
        error = np.square(codes * scale[..., None] - minimum[..., None] - x).sum(axis=-1)
        better = (error < best_error) & (scale > 0)
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
        best_minimum = np.where(better, minimum, best_minimum)
    return best_scale, best_minimum


def _fit_scale(x: Float32) -> Float32:
    """For each [..., n]: the scale with x near code * scale, codes -32..31. Its sign is such that
    the largest magnitude gets the code that has no opposite."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)
    best_scale: Float32 = extreme[..., 0] / np.float32(-32)
    best_error = np.full(best_scale.shape, np.inf, np.float32)
    for stretch in _STRETCHES:
        codes = np.clip(np.rint(_ratio(x * (stretch - 32), extreme)), -32, 31)
        scale = _ratio((codes * x).sum(axis=-1), (codes * codes).sum(axis=-1))
        error = np.square(codes * scale[..., None] - x).sum(axis=-1)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
    return best_scale


def _ratio(a: Float32, b: Float32) -> Float32:
    """a / b, and 0 where b is 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio: Float32 = np.where(b == 0, np.float32(0), a / b)
        return ratio
