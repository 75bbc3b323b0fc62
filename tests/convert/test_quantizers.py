"""The quantisers' errors, against bounds that follow from each format's steps."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from freetoken.convert.quantizers import (
    _PIECE_NUMBERS,
    QUANTIZABLE,
    quantize,
    tensor_factor,
    too_large,
)
from freetoken.formats import by_name

Array = npt.NDArray[np.float32]
# Root mean square error of normal numbers, relative to their own: what a uniform rounding of the
# widest of a sub-block into so many steps gives, and what the reference quantisers reach.
RELATIVE_ERROR = {
    "F32": 0.0,
    "F16": 3e-4,
    "BF16": 2.5e-3,
    "Q8_0": 0.007,
    "Q4_0": 0.1,
    "Q4_1": 0.09,
    "MXFP4": 0.13,
    "NVFP4": 0.1,
    "Q4_K": 0.075,
    "Q5_K": 0.04,
    "Q6_K": 0.02,
}


def normal(rows: int, cols: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, cols), np.float32)


def restored(numbers: Array, name: str) -> Array:
    factor = tensor_factor(numbers) if name == "NVFP4" else np.float32(1)
    return by_name(name).dequantize(quantize(numbers / factor, name)) * factor


def relative_error(found: Array, expected: Array) -> float:
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    return float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))


@pytest.mark.parametrize("name", QUANTIZABLE)
@pytest.mark.parametrize("size", [1.0, 1e-2, 300.0])
def test_error_of_normal_numbers(name: str, size: float) -> None:
    numbers = normal(40, 512) * np.float32(size)
    assert relative_error(restored(numbers, name), numbers) <= RELATIVE_ERROR[name]


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_zeros_stay_zeros(name: str) -> None:
    numbers = np.zeros((3, 512), np.float32)
    numbers[1, :256] = normal(1, 256)
    found = restored(numbers, name)
    assert not found[0].any() and not found[2].any()


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "NVFP4", "MXFP4"])
def test_what_the_format_holds_exactly_comes_back(name: str) -> None:
    """Quantising what was dequantised changes nothing much: the grid is found again."""
    once = restored(normal(8, 512, seed=3), name)
    assert relative_error(restored(once, name), once) < RELATIVE_ERROR[name] / 3


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K"])
def test_numbers_of_one_sign_use_the_minimum(name: str) -> None:
    numbers = normal(8, 512) * np.float32(0.1) - np.float32(1)
    error = np.abs(restored(numbers, name) - numbers).max()
    steps = 15 if name == "Q4_K" else 31
    span = numbers.max() - numbers.min()
    assert error < span / steps + 1.0 / 63  # half a step of codes, and of a 6-bit minimum


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "NVFP4"])
def test_the_reference_reads_the_same_numbers(name: str) -> None:
    packed = quantize(normal(5, 768, seed=9) * np.float32(0.02), name)
    reference = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(by_name(name).dequantize(packed), reference)


def test_pairs_of_mxfp4_are_exact() -> None:
    """Every code with every usual scale comes back, so that MXFP4 in another layout loses none."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    for exponent in range(-40, 20, 7):
        for widest in range(1, 8):
            row = np.resize(np.concatenate([values[: widest + 1], -values[: widest + 1]]), 32)
            numbers = (row * np.float32(2.0**exponent))[None]
            np.testing.assert_array_equal(restored(numbers, "MXFP4"), numbers)


def test_one_outlier_costs_its_own_sub_block_alone() -> None:
    numbers = normal(1, 256) * np.float32(0.01)
    numbers[0, 7] = 5.0
    found = restored(numbers, "NVFP4")
    assert abs(found[0, 7] - 5.0) < 0.2
    assert relative_error(found[:, 16:], numbers[:, 16:]) < 2 * RELATIVE_ERROR["NVFP4"]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("exponent", [-149, -140, -127, -126, -125, -100, -30])
@pytest.mark.parametrize("name", QUANTIZABLE)
def test_numbers_near_nothing_stay_near_nothing(name: str, exponent: int) -> None:
    """Some blocks of real models are all but zero: no scale of theirs may wrap or divide by it."""
    numbers = normal(2, 512)
    numbers[0, :256] = np.ldexp(numbers[0, :256], exponent)
    numbers[1] = np.ldexp(numbers[1], exponent)
    found = restored(numbers, name)
    tiny = np.concatenate([found[0, :256], found[1]])
    assert np.isfinite(tiny).all() and np.abs(tiny).max() <= 2 * np.abs(numbers[1]).max()
    assert relative_error(found[0, 256:], numbers[0, 256:]) <= 1.3 * RELATIVE_ERROR[name]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("exponent", [-149, -140, -127, -110])
def test_a_tensor_near_nothing_has_a_factor(exponent: int) -> None:
    numbers = np.ldexp(np.ones((1, 64), np.float32), exponent)
    found = restored(numbers, "NVFP4")
    assert np.isfinite(found).all() and np.abs(found - numbers).max() <= numbers.max()


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", QUANTIZABLE)
def test_numbers_just_below_the_reach_of_a_format(name: str) -> None:
    most = np.float32(min(too_large(name), float(np.finfo(np.float32).max)))
    most = np.nextafter(most, np.float32(0))
    rows = np.array([np.ones(256), -np.ones(256), np.resize([1, -1], 256)], np.float32) * most
    spread = normal(64, 256)
    spread *= most / np.abs(spread).max(axis=1, keepdims=True)
    for numbers in (rows, np.clip(spread, -most, most)):
        found = restored(numbers, name)
        assert np.isfinite(found).all()
        assert relative_error(found, numbers) <= 2 * RELATIVE_ERROR[name]


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_from_its_reach_on_a_format_is_infinite(name: str) -> None:
    numbers = np.full((1, 32), -too_large(name), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        assert not np.isfinite(restored(numbers, name)).all()


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_beyond_its_reach_a_format_of_nested_scales_cuts_off(name: str) -> None:
    numbers = np.full((1, 256), -1.1 * too_large(name), np.float32)
    assert np.abs(restored(numbers, name)).max() < 0.95 * np.abs(numbers).max()


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_pieces_are_the_whole(name: str) -> None:
    numbers = normal(2 * (_PIECE_NUMBERS // 256) + 3, 256).reshape(1, -1, 256)
    rows = [quantize(numbers[0, at : at + 1], name) for at in (0, 1023, 1024, 2047, 2050)]
    packed = quantize(numbers, name)
    assert packed.shape[:2] == numbers.shape[:2]
    np.testing.assert_array_equal(packed[0, [0, 1023, 1024, 2047, 2050]], np.concatenate(rows))
