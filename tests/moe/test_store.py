"""Mapped and packed experts hold the same weights; records and slots have one layout."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from freetoken.errors import CapacityError, CheckpointError
from freetoken.formats import DS_FP4, FP8_128, MXFP4_PAIRS, NVFP4_PAIRS, PlanarFormat
from freetoken.kernels.base import ExpertBank
from freetoken.moe.store import (
    ExpertTensor,
    LayerExperts,
    MappedExpertStore,
    PackedExpertStore,
    RecordLayout,
    SlotPool,
)
from freetoken.platforms.host_memory import ALIGNMENT_BYTES
from support.moe_fakes import (
    TOY_F32,
    TOY_Q8,
    DeviceMemory,
    HostMemory,
    code_addresses,
    random_layer,
)
from support.reference_ops import read_bias, read_expert

GEOMETRIES = [
    ((TOY_Q8, TOY_Q8, TOY_Q8), 16, 8),
    ((TOY_F32, TOY_F32, TOY_F32), 5, 3),
    ((TOY_Q8, TOY_F32, TOY_Q8), 24, 40),
]


def weights_of(bank: ExpertBank, expert: int) -> list[torch.Tensor]:
    return [read_expert(part, expert) for part in (bank.gate, bank.up, bank.down)]


def truth(layer: LayerExperts, expert: int) -> list[torch.Tensor]:
    return [
        torch.from_numpy(
            part.format.dequantize(part.experts[expert].reshape(part.rows, -1)).copy()
        ).double()
        for part in layer.parts
    ]


@pytest.mark.parametrize(("formats", "hidden", "intermediate"), GEOMETRIES)
def test_all_banks_read_the_checkpoints_weights(
    formats: tuple[object, ...], hidden: int, intermediate: int
) -> None:
    layers = [
        random_layer(i, 3, hidden=hidden, intermediate=intermediate, formats=formats)  # type: ignore[arg-type]
        for i in range(2)
    ]
    mapped, packed = MappedExpertStore(layers), PackedExpertStore(layers, HostMemory())
    pool = SlotPool(HostMemory(), layers, 3)
    for layer in layers:
        pool.pack(layer)
        for expert in range(3):
            expected = truth(layer, expert)
            for bank in (s.bank(layer.layer_id) for s in (mapped, packed, pool)):
                assert bank.experts == 3
                assert bank.activation == "silu"
                for found, wanted in zip(weights_of(bank, expert), expected, strict=True):
                    assert torch.equal(found, wanted)


def planar_part(
    name: str, fmt: PlanarFormat, rows: int, cols: int, experts: int, *, every: int = 1
) -> ExpertTensor:
    """Random codes and scales in stacks of which each `every`th row belongs to the part."""
    rng = np.random.default_rng([rows, cols, every])
    scale_rows, scale_bytes = fmt.scale_plane(every * rows, cols)
    codes = rng.integers(0, 127, (experts, every * rows, fmt.row_bytes(cols)), dtype=np.uint8)
    scales = rng.integers(100, 127, (experts, scale_rows, scale_bytes), dtype=np.uint8)
    if fmt is FP8_128:
        numbers = rng.uniform(0.5, 2, (experts, scale_rows, scale_bytes // 4))
        scales = numbers.astype(np.float32).view(np.uint8)
    factors = rng.uniform(0.5, 2, experts).astype(np.float32) if fmt is NVFP4_PAIRS else None
    return ExpertTensor(
        name,
        fmt,
        rows,
        cols,
        tuple(stack[every - 1 :: every] for stack in codes),
        tuple(stack[every - 1 :: every] if every > 1 else stack for stack in scales),
        factors,
    )


@pytest.mark.parametrize(
    ("fmt", "hidden", "intermediate", "every"),
    [
        (MXFP4_PAIRS, 64, 96, 1),
        (MXFP4_PAIRS, 64, 96, 2),
        (NVFP4_PAIRS, 48, 80, 1),
        (NVFP4_PAIRS, 48, 80, 2),
        (DS_FP4, 32, 64, 1),
        (FP8_128, 576, 130, 1),
    ],
    ids=lambda value: str(value.name if isinstance(value, PlanarFormat) else value),
)
def test_scales_apart_rows_between_others_and_factors(
    fmt: PlanarFormat, hidden: int, intermediate: int, every: int
) -> None:
    """gpt-oss keeps gate and up row by row: the mapped store reads each second row in place."""
    layer = LayerExperts(
        0,
        planar_part("gate", fmt, intermediate, hidden, 3, every=every),
        planar_part("up", fmt, intermediate, hidden, 3, every=every),
        planar_part("down", fmt, hidden, intermediate, 3),
        "silu",
    )
    mapped, packed = MappedExpertStore([layer]), PackedExpertStore([layer], HostMemory())
    pool = SlotPool(HostMemory(), [layer], 2)
    assert int(mapped.bank(0).gate.codes[1]) == layer.gate.experts[1].ctypes.data
    for expert in range(3):
        expected = []
        for part in layer.parts:
            factor = 1.0 if part.factors is None else part.factors[expert]
            planes = part.experts[expert], part.scales[expert]
            expected.append(torch.from_numpy(fmt.dequantize_planes(*planes, factor)).double())
        pool.fill(0, 1, packed.records(0)[expert])
        for bank, index in ((mapped.bank(0), expert), (packed.bank(0), expert), (pool.bank(0), 1)):
            for found, wanted in zip(weights_of(bank, index), expected, strict=True):
                assert torch.equal(found, wanted)
    assert layer.gate.nbytes == sum(d.nbytes for d in (*layer.gate.experts, *layer.gate.scales))
    if fmt is NVFP4_PAIRS:  # a bank of slots made before a fetch sees the factor fetched
        gate = pool.bank(0).gate
        pool.fill(0, 0, packed.records(0)[0])
        first = read_expert(gate, 0)
        pool.fill(0, 0, packed.records(0)[1])
        assert not torch.equal(first, read_expert(gate, 0))
        assert torch.equal(read_expert(gate, 0), weights_of(mapped.bank(0), 1)[0])


def test_biases_lie_in_records_and_slots_and_change_with_the_fetch() -> None:
    layer = random_layer(0, 3, biased=True)
    mapped, packed = MappedExpertStore([layer]), PackedExpertStore([layer], HostMemory())
    pool = SlotPool(HostMemory(), [layer], 2)
    slots = pool.bank(0)
    assert not read_bias(slots.down, 0).any()
    for expert in range(3):
        pool.fill(0, 0, packed.records(0)[expert])
        for name in ("gate", "up", "down"):
            biases = getattr(layer, name).biases
            assert biases is not None
            wanted = torch.from_numpy(biases[expert]).double()
            for bank, index in ((mapped.bank(0), expert), (packed.bank(0), expert), (slots, 0)):
                assert torch.equal(read_bias(getattr(bank, name), index), wanted)


@pytest.mark.parametrize("biases", [np.zeros((3, 7), np.float32), np.zeros((3, 8), np.float64)])
def test_biases_must_fit(biases: np.ndarray) -> None:
    gate = random_layer(0, 3).gate
    with pytest.raises(CheckpointError, match=r"gate biases[\s\S]*float32 \[3, 8\]"):
        replace(gate, biases=biases)


def test_parts_without_their_scales_are_refused() -> None:
    part = planar_part("up", MXFP4_PAIRS, 4, 32, 2)
    with pytest.raises(CheckpointError, match=r"(?s)up .*scales of 0 experts.*2 and 2 for MXFP4"):
        replace(part, scales=())
    with pytest.raises(CheckpointError, match=r"(?s)up scales of expert 0.*3 bytes.*4 cont"):
        replace(part, scales=tuple(scales[:3] for scales in part.scales))
    with pytest.raises(CheckpointError, match="factors of 1"):
        replace(part, factors=np.ones(1, np.float32))
    with pytest.raises(CheckpointError, match="wrong size"):
        replace(part, experts=tuple(codes[:, ::2] for codes in part.experts))


def test_records_and_planes_are_aligned() -> None:
    layers = [random_layer(0, 3, hidden=24, intermediate=40)]
    layout = RecordLayout.of(layers[0])
    assert layout.record_bytes % ALIGNMENT_BYTES == 0
    store = PackedExpertStore(layers, HostMemory())
    for part in (store.bank(0).gate, store.bank(0).up, store.bank(0).down):
        assert not (part.codes % ALIGNMENT_BYTES).any()
        assert not (part.scales % ALIGNMENT_BYTES).any()
        assert (np.diff(part.codes) == layout.record_bytes).all()
    for plane, following in zip(layout.parts[:-1], layout.parts[1:], strict=True):
        assert plane.codes.offset + plane.codes.bytes <= plane.scales.offset
        assert plane.scales.offset + plane.scales.bytes <= following.codes.offset


def test_a_fetch_is_one_copy_of_one_record() -> None:
    layers = [random_layer(0, 4)]
    store, pool = PackedExpertStore(layers, HostMemory()), SlotPool(HostMemory(), layers, 2)
    assert store.layouts[0].record_bytes == pool.layouts[0].record_bytes
    pool.fill(0, 1, store.records(0)[3])
    for found, wanted in zip(weights_of(pool.bank(0), 1), truth(layers[0], 3), strict=True):
        assert torch.equal(found, wanted)
    pool.clear(0, 1)
    assert not pool.record(0, 1).any()


def test_slots_are_zero_until_filled() -> None:
    pool = SlotPool(HostMemory(), [random_layer(0, 4)], 3)
    for slot in range(3):
        assert not pool.record(0, slot).any()
        assert all(not part.any() for part in weights_of(pool.bank(0), slot))


def test_mapped_experts_are_not_copied() -> None:
    layer = random_layer(0, 2)
    gate = MappedExpertStore([layer]).bank(0).gate
    for expert, data in enumerate(layer.gate.experts):
        assert int(gate.codes[expert]) == data.ctypes.data + TOY_Q8.codes.offset
        assert int(gate.scales[expert]) == data.ctypes.data + TOY_Q8.scales.offset


def test_banks_keep_their_memory_alive() -> None:
    layer = random_layer(0, 1)
    expected = truth(layer, 0)
    banks = [
        MappedExpertStore([layer]).bank(0),
        PackedExpertStore([layer], HostMemory()).bank(0),
    ]
    del layer
    gc.collect()
    for bank in banks:
        for found, wanted in zip(weights_of(bank, 0), expected, strict=True):
            assert torch.equal(found, wanted)


def test_a_packed_store_lets_go_of_the_checkpoint() -> None:
    layer = random_layer(0, 1)
    view = weakref.ref(layer.gate.experts[0])
    store = PackedExpertStore([layer], HostMemory())
    pool = SlotPool(HostMemory(), [layer], 1)
    del layer
    gc.collect()
    assert view() is None
    assert store.layers == 1
    assert pool.slots == 1


def test_expert_bytes_must_match_the_shape() -> None:
    data = np.zeros(19, np.uint8)
    with pytest.raises(CheckpointError, match=r"(?s)up weights of expert 0.*19 bytes.*20 cont"):
        ExpertTensor("up", TOY_Q8, 2, 8, (data,))


def test_parts_of_a_layer_must_fit_together() -> None:
    layer = random_layer(0, 2, hidden=16, intermediate=8)
    with pytest.raises(CheckpointError, match=r"(?s)MoE layer 0.*down 2 x \[8, 16\].*\[H, I\]"):
        replace(layer, down=replace(layer.gate, name="down"))
    with pytest.raises(CheckpointError, match="gate 1 x"):
        replace(layer, gate=replace(layer.gate, experts=layer.gate.experts[:1]))


def test_layers_are_numbered_without_gaps() -> None:
    with pytest.raises(ValueError, match=r"numbered \[1\]"):
        MappedExpertStore([random_layer(1, 2)])


def test_records_and_slots_are_placed_before_they_are_written() -> None:
    layers, memory = [random_layer(0, 4), random_layer(1, 3)], HostMemory()  # which checks when
    store, pool = PackedExpertStore(layers, memory), SlotPool(memory, layers, 2)
    banks = [store.bank(0), store.bank(1), pool.bank(0), pool.bank(1)]
    assert memory.placed == [(code_addresses(bank), False) for bank in banks]


def test_too_little_memory_is_the_platforms_error() -> None:
    layers = [random_layer(0, 4)]
    with pytest.raises(CapacityError, match="bytes left"):
        SlotPool(HostMemory(limit_bytes=1000), layers, 4)
    with pytest.raises(CapacityError, match="bytes left"):
        PackedExpertStore(layers, HostMemory(limit_bytes=1000))


@pytest.mark.parametrize(
    ("pinnable", "refuses_after", "plain"),
    [
        (None, None, set()),
        (3, None, set()),
        (2, None, {2}),
        (1.9, None, {1, 2}),
        (0.5, None, {0, 1, 2}),
        (None, 1, {1, 2}),
        (None, 0, {0, 1, 2}),
        (2, 1, {1, 2}),
    ],
)
def test_what_cannot_be_pinned_stays_in_plain_memory(
    pinnable: float | None, refuses_after: int | None, plain: set[int]
) -> None:
    """`pinnable` in layers; all are of one size."""
    layers = [random_layer(i, 3) for i in range(3)]
    layer_bytes = RecordLayout.of(layers[0]).record_bytes * 3
    memory = DeviceMemory(refuses_after=refuses_after)
    store = PackedExpertStore(
        layers,
        memory,
        pinned=True,
        pinnable_bytes=None if pinnable is None else int(pinnable * layer_bytes),
    )
    assert store.plain_layers == plain
    assert memory.pinned_bytes == (3 - len(plain)) * layer_bytes
    for layer in layers:
        for expert in range(3):
            found = weights_of(store.bank(layer.layer_id), expert)
            for one, wanted in zip(found, truth(layer, expert), strict=True):
                assert torch.equal(one, wanted)


def test_without_a_device_nothing_is_pinned() -> None:
    memory = DeviceMemory(refuses_after=0)
    store = PackedExpertStore([random_layer(0, 3)], memory, pinnable_bytes=0)
    assert store.plain_layers == frozenset() and memory.pinned_bytes == 0
