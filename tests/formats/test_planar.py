"""Formats whose scales lie in a tensor of their own, against transformers, bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.integrations import finegrained_fp8, mxfp4

from freetoken.formats import (
    DS_FP4,
    FP8_128,
    MXFP4_PAIRS,
    NVFP4_PAIRS,
    PlanarFormat,
)

Bytes = npt.NDArray[np.uint8]

pair_formats = pytest.mark.parametrize(
    "fmt", [MXFP4_PAIRS, NVFP4_PAIRS, DS_FP4], ids=lambda fmt: fmt.name
)


def assert_same_bits(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    assert found.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def all_codes(fmt: PlanarFormat, scales: int) -> Bytes:
    """Rows in which every byte meets every scale and every place: [256, scales * codes.bytes]."""
    order = np.arange(256, dtype=np.uint8)
    bytes_ = fmt.row_bytes(scales * (fmt.scale_block or (1, 1))[1])
    return np.stack([np.resize(np.roll(order, -shift), bytes_) for shift in range(256)])


def test_mxfp4_is_what_transformers_makes_of_gpt_oss() -> None:
    codes = all_codes(MXFP4_PAIRS, 255)
    scales = np.tile(np.arange(255, dtype=np.uint8), (256, 1))  # 255 is NaN: see below
    found = MXFP4_PAIRS.dequantize_planes(codes, scales)
    oracle = mxfp4.convert_moe_packed_tensors(
        torch.from_numpy(codes).view(1, 256, 255, 16),
        torch.from_numpy(scales).view(1, 256, 255),
        dtype=torch.float32,
    )
    assert_same_bits(found, oracle[0].T.contiguous().numpy())


def test_deepseek_fp4_is_what_transformers_makes_of_it() -> None:
    codes = all_codes(DS_FP4, 255)
    scales = np.tile(np.arange(255, dtype=np.uint8), (256, 1))
    found = DS_FP4.dequantize_planes(codes, scales)
    oracle = finegrained_fp8.Fp8Dequantize(None)._dequantize_one(
        torch.from_numpy(codes).view(torch.int8),
        torch.from_numpy(scales).view(torch.float8_e8m0fnu),
        output_dtype=torch.float32,
    )
    assert_same_bits(found, oracle.numpy())


@pytest.mark.parametrize("fmt", [MXFP4_PAIRS, DS_FP4], ids=lambda fmt: fmt.name)
def test_the_nan_of_e8m0_is_no_number(fmt: PlanarFormat) -> None:
    numbers = fmt.dequantize_planes(np.zeros((1, 32), np.uint8), np.array([[255, 127]], np.uint8))
    assert np.isnan(numbers[0, :32]).all() and (numbers[0, 32:] == 0).all()


def test_nvfp4_multiplies_in_the_written_order() -> None:
    """e2m1 * e4m3 is exact in float32, so that the product with the factor is rounded once."""
    codes = all_codes(NVFP4_PAIRS, 256)
    scales = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    e4m3 = torch.from_numpy(scales).view(torch.float8_e4m3fn).double().numpy()
    positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    e2m1 = np.concatenate([positive, -positive])
    values = np.stack([e2m1[codes & 15], e2m1[codes >> 4]], axis=-1).reshape(256, -1)
    for factor in (1.0, 0.000123, -3e38):
        with np.errstate(over="ignore"):
            exact = values * e4m3.repeat(16, axis=1) * np.float64(np.float32(factor))
            expected = exact.astype(np.float32)
        found = NVFP4_PAIRS.dequantize_planes(codes, scales, factor)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("rows", "cols"), [(576, 256), (128, 128), (3, 200), (129, 130)])
def test_fp8_blocks_are_what_transformers_makes_of_them(rows: int, cols: int) -> None:
    """576 rows have 5 rows of scales: blocks at the ends are smaller."""
    generator = np.random.default_rng(rows)
    codes = generator.integers(0, 256, (rows, cols), dtype=np.uint8)
    scale_rows, scale_bytes = FP8_128.scale_plane(rows, cols)
    assert (scale_rows, scale_bytes) == (-(-rows // 128), 4 * -(-cols // 128))
    scales = generator.choice(
        np.array([0, 1, 1e-45, 1e-38, 3.4e38, np.inf, -2.5, 0.0013], np.float32),
        (scale_rows, scale_bytes // 4),
    )
    oracle = finegrained_fp8._dequantize_fp8_weight(
        torch.from_numpy(codes).view(torch.float8_e4m3fn),
        torch.from_numpy(scales),
        [128, 128],
        torch.float32,
    )
    found = FP8_128.dequantize_planes(codes, scales.view(np.uint8))
    expected = oracle.numpy()
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    numbers = ~np.isnan(found)
    assert_same_bits(found[numbers], expected[numbers])


def test_all_e4m3_codes() -> None:
    every = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(every).view(torch.float8_e4m3fn).float().numpy()
    found = FP8_128.dequantize(every)
    numbers = ~np.isnan(expected)
    assert numbers.sum() == 254 and np.isnan(found[~numbers]).all()
    assert_same_bits(found[numbers], expected[numbers])


@pair_formats
def test_stacks_of_matrices_and_their_factors(fmt: PlanarFormat) -> None:
    generator = np.random.default_rng(0)
    cols = 96
    codes = generator.integers(0, 256, (3, 5, fmt.row_bytes(cols)), dtype=np.uint8)
    shape = fmt.scale_plane(5, cols)
    scales = generator.integers(100, 120, (3, *shape), dtype=np.uint8)
    factors = np.array([1, 0.5, 3], np.float32)
    stacked = fmt.dequantize_planes(codes, scales, factors)
    assert stacked.shape == (3, 5, cols)
    for expert, factor in enumerate(factors):
        one = fmt.dequantize_planes(codes[expert], scales[expert], factor)
        np.testing.assert_array_equal(stacked[expert], one)
    plain = fmt.dequantize(codes)
    assert np.isin(np.abs(plain), [0, 0.5, 1, 1.5, 2, 3, 4, 6]).all()
