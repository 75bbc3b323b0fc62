"""Random weights in every format, with scales that make ordinary numbers of them."""

from __future__ import annotations

import numpy as np

from freetoken.formats import FORMATS, PlanarFormat
from freetoken.formats.base import Bytes, WeightFormat

_E8M0 = ("MXFP4", "MXFP4_PAIRS", "DS_FP4")
_E4M3 = ("NVFP4", "NVFP4_PAIRS")
_K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")


def random_matrix(
    rng: np.random.Generator, fmt: WeightFormat, rows: int, cols: int
) -> tuple[Bytes, Bytes | None]:
    """Rows of a matrix, uint8 [rows, row bytes], and its plane of scales if they lie apart."""
    assert fmt.name in FORMATS
    if fmt.scales.bytes == 0:
        return _plain(rng, fmt, rows, cols), None
    data = rng.integers(0, 256, (rows, fmt.row_bytes(cols)), dtype=np.uint8)
    if isinstance(fmt, PlanarFormat):
        if fmt.name == "FP8_128":
            data[(data & 0x7F) == 0x7F] = 0  # not a number
        scale_rows, row_bytes = fmt.scale_plane(rows, cols)
        count = scale_rows * row_bytes // fmt.scales.bytes
        return data, _scales(rng, fmt, count).reshape(scale_rows, row_bytes)
    blocks = data.reshape(-1, fmt.block_bytes)
    field = slice(fmt.scales.offset, fmt.scales.offset + fmt.scales.bytes)
    blocks[:, field] = _scales(rng, fmt, len(blocks))
    return data, None


def _plain(rng: np.random.Generator, fmt: WeightFormat, rows: int, cols: int) -> Bytes:
    values = rng.normal(0, 0.1, (rows, cols)).astype(np.float32)
    if fmt.name == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype({"F32": np.float32, "F16": np.float16}[fmt.name]).view(np.uint8)


def _scales(rng: np.random.Generator, fmt: WeightFormat, count: int) -> Bytes:
    """Fields of scales, uint8 [count, fmt.scales.bytes]."""
    shape = count, fmt.scales.bytes
    if fmt.name in _E8M0:
        return rng.integers(120, 125, shape, dtype=np.uint8)
    if fmt.name in _E4M3:
        return rng.integers(0x08, 0x20, shape, dtype=np.uint8)
    if fmt.name == "FP8_128":
        return rng.uniform(0.0005, 0.002, (count, 1)).astype(np.float32).view(np.uint8)
    small = 16 if fmt.codes.bytes < fmt.block_elements else 1  # nibbles
    halves = (rng.uniform(0.0005, 0.002, shape) * small).astype(np.float16).view(np.uint8)
    if fmt.name not in _K_QUANTS:
        return halves[:, : fmt.scales.bytes]
    scales = rng.integers(0, 256, shape, dtype=np.uint8)  # of the sub-blocks
    if fmt.name == "Q6_K":
        scales[:, -2:] = (rng.uniform(1e-5, 4e-5, (count, 1)).astype(np.float16)).view(np.uint8)
    else:
        scales[:, :4] = (rng.uniform(2e-4, 5e-4, (count, 2)).astype(np.float16)).view(np.uint8)
    return scales
