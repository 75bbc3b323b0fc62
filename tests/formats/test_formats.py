"""Every format of blocks against gguf.quants, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from freetoken.errors import CheckpointError
from freetoken.formats import FORMATS, PlanarFormat, WeightFormat, by_name

# binary16 bit patterns: zeros, smallest and largest subnormal, smallest normal, 1, largest,
# infinities, quiet and signalling NaNs, each with both signs.
EXTREME_F16 = [
    bits | sign
    for bits in (0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0x7E00, 0x7D01)
    for sign in (0x0000, 0x8000)
]

BLOCK_FORMATS = {name: fmt for name, fmt in FORMATS.items() if not isinstance(fmt, PlanarFormat)}
all_formats = pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS.keys())
E8M0_NAN = 255  # gguf gives a finite number there


def oracle(fmt: WeightFormat, rows: np.ndarray) -> np.ndarray:
    qtype = GGMLQuantizationType[fmt.name]
    with np.errstate(invalid="ignore", over="ignore"):
        if fmt.name in ("F32", "F16"):  # gguf.quants wants these as numbers, not as bytes
            rows = rows.view({"F32": np.float32, "F16": np.float16}[fmt.name])
        return np.asarray(gguf_dequantize(rows, qtype), np.float32)


def random_rows(fmt: WeightFormat, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random bytes of `shape` blocks."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (*shape, fmt.block_bytes), dtype=np.uint8)
    if fmt.name == "MXFP4":
        blocks[..., 0] = np.where(blocks[..., 0] == E8M0_NAN, 0, blocks[..., 0])
    return blocks.reshape(*shape[:-1], shape[-1] * fmt.block_bytes)


def extreme_scales(fmt: WeightFormat) -> np.ndarray:
    """Fields of scales with every extreme value: uint8 [n, scales.bytes]."""
    generator = np.random.default_rng(0)
    halves = np.array(EXTREME_F16, "<u2")
    if fmt.name in ("MXFP4", "NVFP4"):
        count = 255 if fmt.name == "MXFP4" else 256
        every = np.arange(count, dtype=np.uint8)
        return np.stack([np.roll(every, -i) for i in range(fmt.scales.bytes)], axis=1)
    count = len(halves) * 16
    scales = generator.integers(0, 256, (count, fmt.scales.bytes), dtype=np.uint8)
    if fmt.name == "Q6_K":
        scales[:, -2:] = np.repeat(halves, 16).view(np.uint8).reshape(count, 2)
        scales[::16, :-2] = np.array([-128, 127, 0, -1] * 4, np.int8).view(np.uint8)
        return scales
    for start in range(0, min(fmt.scales.bytes, 4), 2):
        chosen = np.repeat(halves, 16) if start == 0 else generator.choice(halves, count)
        scales[:, start : start + 2] = chosen.view(np.uint8).reshape(count, 2)
    if fmt.scales.bytes > 4:
        scales[::16, 4:], scales[1::16, 4:] = 0xFF, 0
    return scales


def assert_same_bits(fmt: WeightFormat, rows: np.ndarray) -> None:
    ours = fmt.dequantize(rows)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours.view(np.uint32), oracle(fmt, rows).view(np.uint32))


@all_formats
def test_block_facts(fmt: WeightFormat) -> None:
    from gguf.constants import GGML_QUANT_SIZES

    sizes = GGML_QUANT_SIZES[GGMLQuantizationType[fmt.name]]
    assert (fmt.block_elements, fmt.block_bytes) == sizes
    covered = sorted(
        byte
        for field in (fmt.codes, fmt.scales)
        for byte in range(field.offset, field.offset + field.bytes)
    )
    assert covered == list(range(fmt.block_bytes)), "codes and scales tile the block"


@all_formats
@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (2, 3, 4)])
def test_random_blocks(fmt: WeightFormat, shape: tuple[int, ...]) -> None:
    """Random bytes: scales of every kind, infinities and NaNs among them."""
    rows = random_rows(fmt, shape, seed=len(shape))
    assert_same_bits(fmt, rows)
    assert fmt.dequantize(rows).shape == (*shape[:-1], shape[-1] * fmt.block_elements)


@all_formats
def test_all_codes_with_extreme_scales(fmt: WeightFormat) -> None:
    """Every byte value at every position of the codes, under every extreme scale."""
    order = np.arange(256, dtype=np.uint8)
    codes = np.stack([np.roll(order, -shift)[: fmt.codes.bytes] for shift in range(256)])
    for scales in extreme_scales(fmt) if fmt.scales.bytes else [np.empty(0, np.uint8)]:
        rows = np.empty((256, fmt.block_bytes), np.uint8)
        rows[:, fmt.codes.offset : fmt.codes.offset + fmt.codes.bytes] = codes
        rows[:, fmt.scales.offset : fmt.scales.offset + fmt.scales.bytes] = scales
        assert_same_bits(fmt, rows)


@all_formats
def test_planes_of_blocks(fmt: WeightFormat) -> None:
    """Codes and scales in planes of their own, as a packed record has them."""
    rows = random_rows(fmt, (3, 5, 2), seed=4)
    blocks = rows.reshape(3, 5, 2, fmt.block_bytes)
    codes, scales = (
        blocks[..., field.offset : field.offset + field.bytes].reshape(3, 5, -1)
        for field in (fmt.codes, fmt.scales)
    )
    assert (5, scales.shape[-1]) == fmt.scale_plane(5, 2 * fmt.block_elements)
    found, expected = fmt.dequantize_planes(codes, scales), fmt.dequantize(rows)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    factors = np.array([2, -0.5, 3], np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = expected * factors[:, None, None]
    np.testing.assert_array_equal(fmt.dequantize_planes(codes, scales, factors), scaled)


def test_a_scale_that_is_no_number_gives_no_number() -> None:
    """e8m0 has one NaN: it must not become a finite weight."""
    assert np.isnan(by_name("MXFP4").dequantize(np.full(17, E8M0_NAN, np.uint8))).all()


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_all_sixteen_bit_patterns(name: str) -> None:
    rows = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(256, -1)
    assert_same_bits(by_name(name), rows)


def test_known_blocks() -> None:
    """Values worked out by hand, so that the layout does not rest on the oracle alone."""
    half = np.array([0.5], "<f2").view(np.uint8)
    two = np.array([2.0], "<f2").view(np.uint8)
    codes = np.arange(16, dtype=np.uint8) | np.uint8(0xF0)  # low nibbles 0..15, high all 15
    q4_0 = by_name("Q4_0").dequantize(np.concatenate([half, codes]))
    np.testing.assert_array_equal(q4_0, [(q - 8) * 0.5 for q in range(16)] + [3.5] * 16)
    q4_1 = by_name("Q4_1").dequantize(np.concatenate([half, two, codes]))
    np.testing.assert_array_equal(q4_1, [q * 0.5 + 2 for q in range(16)] + [9.5] * 16)
    q8_0 = by_name("Q8_0").dequantize(
        np.concatenate([half, np.arange(-16, 16, dtype=np.int8).view(np.uint8)])
    )
    np.testing.assert_array_equal(q8_0, [q * 0.5 for q in range(-16, 16)])
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    mxfp4 = by_name("MXFP4").dequantize(np.concatenate([np.array([128], np.uint8), codes]))
    signed = [2 * v for v in e2m1] + [-2 * v for v in e2m1]
    np.testing.assert_array_equal(mxfp4, signed + [-12] * 16)
    scales = np.array([0x38, 0x40, 0x01, 0x7E], np.uint8)  # 1, 2, 2^-9, 448
    quarters = np.tile(np.arange(8, dtype=np.uint8) | np.uint8(0xF0), 4)
    nvfp4 = by_name("NVFP4").dequantize(np.concatenate([scales, quarters]))
    expected = [v * s for s in (1, 2, 2.0**-9, 448) for v in [*e2m1, *[-6] * 8]]
    np.testing.assert_array_equal(nvfp4, expected)


@all_formats
def test_does_not_alias_its_input(fmt: WeightFormat) -> None:
    rows = np.zeros((2, fmt.block_bytes), np.uint8)
    numbers = fmt.dequantize(rows)
    assert not np.shares_memory(numbers, rows)
    assert numbers.flags.writeable


@all_formats
def test_unaligned_and_strided_input(fmt: WeightFormat) -> None:
    generator = np.random.default_rng(1)
    padded = generator.integers(0, 256, (4, 2 * fmt.block_bytes + 1), dtype=np.uint8)
    rows = padded[:, 1:]
    np.testing.assert_array_equal(
        fmt.dequantize(rows).view(np.uint32), fmt.dequantize(rows.copy()).view(np.uint32)
    )


@all_formats
def test_no_rows(fmt: WeightFormat) -> None:
    assert fmt.dequantize(np.zeros((0, fmt.block_bytes), np.uint8)).shape == (
        0,
        fmt.block_elements,
    )
    assert fmt.dequantize(np.zeros((3, 0), np.uint8)).shape == (3, 0)


def test_row_bytes() -> None:
    assert by_name("Q8_0").row_bytes(96) == 102
    assert by_name("BF16").row_bytes(3) == 6
    assert by_name("Q6_K").row_bytes(512) == 420
    assert by_name("NVFP4_PAIRS").row_bytes(48) == 24
    assert by_name("FP8_128").row_bytes(130) == 130
    with pytest.raises(CheckpointError, match=r"(?s)33 columns.*multiple of 32"):
        by_name("Q4_0").row_bytes(33)


def test_partial_block() -> None:
    with pytest.raises(CheckpointError, match=r"(?s)19 bytes.*multiple of 18"):
        by_name("Q4_0").dequantize(np.zeros(19, np.uint8))


def test_unknown_name() -> None:
    with pytest.raises(CheckpointError, match=r"(?s)found: +Q9_9.*F32, F16, BF16, Q8_0"):
        by_name("Q9_9")
