"""Tiles of every weight format against its reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from freetoken.errors import CheckpointError
from freetoken.formats import FORMATS
from freetoken.formats.base import ByteRange, Bytes, WeightFormat
from freetoken.formats.bf16 import BF16Format
from freetoken.kernels.triton.formats import TRITON_FORMATS, triton_format

EXTREME_F16 = [
    bits | sign
    for bits in (0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0x7E00, 0x7D01)
    for sign in (0x0000, 0x8000)
]
all_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())


@triton.jit
def read_tiles(
    codes_ptr,
    scales_ptr,
    out_ptr,
    first_row,
    rows,
    cols,
    code_row_stride,
    scale_row_stride,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows first_row + 0 .. ROWS - 1 of a matrix as float32 [ROWS, whole tiles]."""
    lines = tl.arange(0, ROWS)
    width = tl.cdiv(cols, BLOCK_K) * BLOCK_K
    for k0 in range(0, cols, BLOCK_K):
        numbers = TILE(
            codes_ptr,
            scales_ptr,
            first_row + lines,
            first_row + lines < rows,
            k0,
            cols,
            code_row_stride,
            scale_row_stride,
            BLOCK_K,
        )
        k = k0 + tl.arange(0, BLOCK_K)
        tl.store(out_ptr + lines[:, None] * width + k[None, :], numbers)


def tiles(
    fmt: WeightFormat, codes: Bytes, scales: Bytes, first_row: int, block_k: int, device: str
) -> np.ndarray:
    """float32 [rows - first_row, whole tiles] of planes codes [rows, ...] and scales."""
    rows, code_bytes = codes.shape
    cols = code_bytes // fmt.codes.bytes * fmt.block_elements
    lines = triton.next_power_of_2(max(2, rows - first_row + 1))  # one at least that is masked
    out = torch.full((lines, triton.cdiv(cols, block_k) * block_k), 7.0, device=device)
    planes = [torch.from_numpy(plane.copy()).to(device) for plane in (codes, scales)]
    read_tiles[(1,)](
        *planes,
        out,
        first_row,
        rows,
        cols,
        code_bytes,
        scales.shape[1],
        TILE=triton_format(fmt).tile,
        ROWS=lines,
        BLOCK_K=block_k,
    )
    numbers = out.cpu().numpy()
    assert (numbers[rows - first_row :] == 0).all(), "masked rows are zero"
    assert (numbers[:, cols:] == 0).all(), "columns beyond the matrix are zero"
    return numbers[: rows - first_row, :cols]


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """The same numbers, signs of zeros included; one NaN is as good as another."""
    not_numbers = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), not_numbers)
    bits = [np.where(not_numbers, np.float32(0), a).view(np.uint32) for a in (found, expected)]
    np.testing.assert_array_equal(*bits)


def extreme_scales(fmt: WeightFormat) -> Bytes:
    """Fields of scales with every extreme value: uint8 [n, scales.bytes]."""
    if fmt.name in ("MXFP4", "MXFP4_PAIRS", "DS_FP4", "NVFP4", "NVFP4_PAIRS"):
        every = np.arange(256, dtype=np.uint8)
        return np.stack([np.roll(every, -i) for i in range(fmt.scales.bytes)], axis=1)
    if fmt.name == "FP8_128":
        numbers = [0, -0.0, 1e-45, 1e-38, 1, -3, 3e38, np.inf, -np.inf, np.nan]
        return np.array(numbers, np.float32).view(np.uint8).reshape(-1, 4)
    rng = np.random.default_rng(0)
    halves = np.array(EXTREME_F16, "<u2").view(np.uint8).reshape(-1, 2)
    scales = rng.integers(0, 256, (4 * len(halves), fmt.scales.bytes), dtype=np.uint8)
    scales[0::4, 4:], scales[1::4, 4:] = 0xFF, 0
    repeated = np.repeat(halves, 4, axis=0)
    if fmt.name == "Q6_K":
        scales[2::4, :-2] = np.array([-128, 127, 0, -1] * 4, np.int8).view(np.uint8)
        scales[:, -2:] = repeated
        return scales
    scales[:, :2] = repeated
    scales[:, 2:4] = rng.permutation(repeated)[:, : scales.shape[1] - 2]
    return scales


def every_code(fmt: WeightFormat) -> Bytes:
    """Blocks in which every byte value stands at every place: uint8 [256, codes.bytes]."""
    order = np.arange(256, dtype=np.uint8)
    return np.stack([np.roll(order, -shift)[: fmt.codes.bytes] for shift in range(256)])


def test_every_format_has_a_tile() -> None:
    assert set(TRITON_FORMATS) == set(FORMATS)


def test_a_format_without_kernels_is_named() -> None:
    other = BF16Format("Q3_X", 1, 2, ByteRange(0, 2), ByteRange(0, 0))
    with pytest.raises(CheckpointError, match="Q3_X"):
        triton_format(other)


@all_formats
def test_random_bytes(fmt: WeightFormat, device: str) -> None:
    """Odd numbers of blocks and rows, at every width of tile; FP8's last blocks are short."""
    rng = np.random.default_rng(1)
    rows, cols = (131, 160) if fmt.name == "FP8_128" else (3, max(96, 3 * fmt.block_elements))
    codes = rng.integers(
        0, 256, (rows, cols // fmt.block_elements * fmt.codes.bytes), dtype=np.uint8
    )
    scales = rng.integers(0, 256, fmt.scale_plane(rows, cols), dtype=np.uint8)
    expected = fmt.dequantize_planes(codes, scales)
    entry = triton_format(fmt)
    for block_k in (entry.least_block_k, entry.block_k, min(256, entry.most_block_k)):
        assert_same_bits(tiles(fmt, codes, scales, 0, block_k, device), expected)
    first_row = rows - 2
    found = tiles(fmt, codes, scales, first_row, entry.block_k, device)
    assert_same_bits(found, expected[first_row:])


@all_formats
def test_all_codes_with_extreme_scales(fmt: WeightFormat, device: str) -> None:
    """Every byte at every place of the codes; every extreme scale with 256 bytes of codes."""
    per_row = max(1, 512 // fmt.block_elements)
    blocks, scales = every_code(fmt), np.empty((1, 0), np.uint8)
    if fmt.scales.bytes and fmt.block_elements > 1:
        scales = extreme_scales(fmt)
    count = -(-max(len(scales) * 3, 256) // per_row) * per_row
    codes = blocks[np.arange(count) * 5 % 256].reshape(count // per_row, -1)
    scales = scales[np.arange(count) % len(scales)].reshape(count // per_row, -1)
    for plane in extreme_scales(fmt)[:, None] if fmt.name == "FP8_128" else [scales]:
        plane = plane.repeat(per_row // 128, axis=0).reshape(1, -1) if plane.size == 4 else plane
        expected = fmt.dequantize_planes(codes, plane)
        found = tiles(fmt, codes, plane, 0, triton_format(fmt).block_k, device)
        assert_same_bits(found, expected)


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_all_sixteen_bit_patterns(name: str, device: str) -> None:
    fmt = FORMATS[name]
    codes = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(128, -1)
    scales = np.empty((128, 0), np.uint8)
    expected = fmt.dequantize_planes(codes, scales)
    assert_same_bits(tiles(fmt, codes, scales, 0, 512, device), expected)
