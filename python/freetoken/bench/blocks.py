"""Random weights in every format: all codes, and scales that keep activations finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from freetoken.formats.base import WeightFormat

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RandomMatrix:
    """The bytes of a matrix [rows, cols]. `scales` is None where blocks carry their own."""

    codes: Bytes
    scales: Bytes | None

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)


def matrix_bytes(fmt: WeightFormat, rows: int, cols: int) -> tuple[int, int]:
    """Bytes of the codes (with the scales, where blocks carry them) and of a plane of scales."""
    if fmt.scale_block is None:
        return rows * fmt.row_bytes(cols), 0
    plane_rows, plane_row_bytes = fmt.scale_plane(rows, cols)
    return rows * fmt.row_bytes(cols), plane_rows * plane_row_bytes


def random_matrix(
    fmt: WeightFormat, rows: int, cols: int, rng: np.random.Generator
) -> RandomMatrix:
    """Numbers of a standard deviation of some hundredths."""
    code_bytes, scale_bytes = matrix_bytes(fmt, rows, cols)
    codes = rng.integers(0, 256, code_bytes, dtype=np.uint8)
    _SHAPERS[fmt.name](codes.reshape(-1, fmt.block_bytes))
    if fmt.scale_block is None:
        return RandomMatrix(codes, None)
    pattern = np.frombuffer(_PLANE_SCALES[fmt.name], np.uint8)
    return RandomMatrix(codes, np.tile(pattern, scale_bytes // len(pattern)))


def _field(offset: int, dtype: str, *values: float) -> Callable[[Bytes], None]:
    """Writes fixed scales over a field of every block [n, block_bytes]."""
    pattern = np.array(values, dtype).view(np.uint8)

    def write(blocks: Bytes) -> None:
        blocks[:, offset : offset + len(pattern)] = pattern

    return write


def _bits(dtype: str, keep: int, put: int) -> Callable[[Bytes], None]:
    """Keeps sign and mantissa of random floats and gives all one exponent."""

    def write(blocks: Bytes) -> None:
        words = blocks.reshape(-1).view(dtype)
        words &= np.array(keep, dtype)
        words |= np.array(put, dtype)

    return write


def _normal_e4m3(blocks: Bytes) -> None:
    """Normally distributed, the largest of 128 x 128 at the end of the range, as in a checkpoint
    (subnormal numbers, which take a slower path, are rare)."""
    seed = int.from_bytes(blocks.reshape(-1)[:4].tobytes(), "little")
    numbers = torch.randn(blocks.size, generator=torch.Generator().manual_seed(seed))
    deviation = _LARGEST_E4M3 / 4  # the largest of 16384 lies at about four standard deviations
    codes = (numbers * deviation).clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
    blocks.reshape(-1)[:] = codes.view(torch.uint8).numpy()


def _unchanged(blocks: Bytes) -> None:
    pass


_LARGEST_E4M3 = 448.0
_E4M3 = 0x10  # 2^-5
_E8M0 = 121  # 2^-6
_SHAPERS: dict[str, Callable[[Bytes], None]] = {
    "F32": _bits("<u4", 0x807FFFFF, 0x3C000000),
    "F16": _bits("<u2", 0x83FF, 0x2000),
    "BF16": _bits("<u2", 0x807F, 0x3C00),
    "Q8_0": _field(0, "<f2", 0.0003),
    "Q4_0": _field(0, "<f2", 0.005),
    "Q4_1": _field(0, "<f2", 0.005, -0.0375),
    "Q4_K": _field(0, "<f2", 0.0002, 0.0015),
    "Q5_K": _field(0, "<f2", 0.0001, 0.0015),
    "Q6_K": _field(208, "<f2", 0.00003),
    "MXFP4": _field(0, "u1", _E8M0),
    "NVFP4": _field(0, "u1", _E4M3, _E4M3, _E4M3, _E4M3),
    "MXFP4_PAIRS": _unchanged,
    "NVFP4_PAIRS": _unchanged,
    "DS_FP4": _unchanged,
    "FP8_128": _normal_e4m3,
}
_PLANE_SCALES = {
    "MXFP4_PAIRS": bytes([_E8M0]),
    "DS_FP4": bytes([_E8M0]),
    "NVFP4_PAIRS": bytes([_E4M3]),
    "FP8_128": np.array([0.0003], "<f4").tobytes(),
}
