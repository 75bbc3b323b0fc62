"""Settling the memory of a GPU, over a table of machines and models; no GPU is needed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.config import CheckpointFacts, EngineConfig, Hardware, ResolvedConfig, resolve
from freetoken.errors import CapacityError, ConfigError
from freetoken.gpu_budget import DecoderSizes, decode_bytes, prefill_bytes

GIB, MIB = 2**30, 2**20
# Eight experts in four layers, 2 GiB of experts in all: a slot is 256 MiB, two layers are 1 GiB. A
# token's keys and values take 64 KiB, a page 2 MiB. 512 MiB of other weights.
MOE = CheckpointFacts(
    weight_bytes=2560 * MIB,
    expert_bytes=2048 * MIB,
    experts=8,
    top_k=2,
    kv_bytes_per_token=64 << 10,
    context_tokens=8192,
    slot_bytes=256 * MIB,
    largest_layer_bytes=512 * MIB,
    sizes=DecoderSizes(hidden=128, vocab=1024, query=128, key=64, expert=256, experts=8, top_k=2),
)
DENSE = replace(
    MOE,
    expert_bytes=0,
    experts=0,
    top_k=0,
    slot_bytes=0,
    largest_layer_bytes=0,
    sizes=DecoderSizes(hidden=128, vocab=1024, query=128, key=64, dense=512),
)
PAGE = 2 * MIB
FLOOR = 129  # pages of 4096 tokens, and page 0


def activations(facts: CheckpointFacts) -> int:
    return prefill_bytes(facts.sizes, 2048, 64) + decode_bytes(facts.sizes, 64)


def settled(
    free_bytes: int, config: EngineConfig | None = None, facts: CheckpointFacts = MOE, **more: int
) -> ResolvedConfig:
    """With all of what is free to be used, unless `config` says otherwise."""
    config = EngineConfig(gpu_memory_fraction=1.0) if config is None else config
    return resolve(config, facts, Hardware(64 * GIB, gpu_bytes=free_bytes), **more)


def asked(**options: object) -> EngineConfig:
    return EngineConfig(**{"gpu_memory_fraction": 1.0, **options})  # type: ignore[arg-type]


A = activations(MOE)
FUSED = 2560 * MIB + A + FLOOR * PAGE
HYBRID = 512 * MIB + A + 1024 * MIB + FLOOR * PAGE  # without slots


@pytest.mark.parametrize(
    ("free", "options", "expected"),
    [
        # Everything fits, to the byte; pages take what is left.
        (FUSED, {}, ("fused", 8, FLOOR)),
        (FUSED + 10 * PAGE, {}, ("fused", 8, FLOOR + 10)),
        (100 * GIB, {}, ("fused", 8, 64 * 256 + 1)),
        # One byte less: two layers' buffers take the place of four slots; pages take the last MiB.
        (FUSED - 1, {}, ("hybrid", 3, FLOOR + 127)),
        (HYBRID + 256 * MIB, {}, ("hybrid", 1, FLOOR)),
        (HYBRID + 3 * 256 * MIB + 5 * PAGE, {}, ("hybrid", 3, FLOOR + 5)),
        (HYBRID + 2 * 256 * MIB, {"strategy": "offload"}, ("offload", 2, FLOOR)),
        (100 * GIB, {"strategy": "hybrid"}, ("hybrid", 8, 64 * 256 + 1)),
        (100 * GIB, {"strategy": "hybrid", "cache_slots": 3}, ("hybrid", 3, 64 * 256 + 1)),
        # Fewer tokens of keys and values make room for slots.
        (
            HYBRID - 128 * PAGE + 256 * MIB + 32 * PAGE,
            {"strategy": "hybrid", "kv_tokens": 1024},
            ("hybrid", 1, 33),
        ),
        # The CPU computes the experts: neither slots nor buffers.
        (512 * MIB + A + FLOOR * PAGE, {"strategy": "cpu"}, ("cpu", None, FLOOR)),
        # A share of what is free.
        (2 * FUSED, {"gpu_memory_fraction": 0.5}, ("fused", 8, FLOOR)),
    ],
)
def test_what_fits(
    free: int, options: dict[str, object], expected: tuple[str, int | None, int]
) -> None:
    found = settled(free, asked(**options))
    assert (found.strategy, found.cache_slots, found.kv_pages) == expected
    assert found.prefill_budget_tokens == 2048 and not found.notes


def test_a_dense_model_gives_the_rest_to_keys_and_values() -> None:
    free = 2560 * MIB + activations(DENSE) + (FLOOR + 7) * PAGE
    found = settled(free, facts=DENSE)
    assert (found.strategy, found.cache_slots, found.kv_pages) == (None, None, FLOOR + 7)


def test_a_short_context_needs_no_more_than_itself() -> None:
    facts = replace(MOE, context_tokens=64)
    found = settled(512 * MIB + A + 3 * PAGE, asked(strategy="cpu"), facts)
    assert found.kv_pages == 3


def test_measured_headroom_takes_the_place_of_the_bound() -> None:
    free = FUSED + 20 * PAGE
    bound = prefill_bytes(MOE.sizes, 2048, 64)
    assert settled(free).kv_pages == FLOOR + 20
    assert settled(free, headroom_bytes=bound).kv_pages == FLOOR + 20
    assert settled(free, headroom_bytes=bound - 4 * PAGE).kv_pages == FLOOR + 24
    assert settled(free, headroom_bytes=bound + 4 * PAGE).kv_pages == FLOOR + 16


def test_too_little_says_what_takes_how_much() -> None:
    with pytest.raises(CapacityError) as refused:
        settled(HYBRID, asked(strategy="hybrid", cache_slots=4))
    said = str(refused.value)
    assert "the strategy hybrid needs at least" in said
    for part in (
        "512.0 MiB for weights",
        f"{A / MIB:.1f} MiB for activations",
        "1.00 GiB for two layers of experts in prefill",
        "1.00 GiB for 4 expert slots per layer",
        "258.0 MiB for keys and values of 4096 tokens",
    ):
        assert part in said
    with pytest.raises(CapacityError, match=r"the model needs at least .*--device cpu") as refused:
        settled(GIB, facts=DENSE)
    assert "slots" not in str(refused.value) and "--strategy" not in str(refused.value)


@pytest.mark.parametrize(
    ("free", "options", "fits"),
    [
        (HYBRID + 3 * 256 * MIB, {"strategy": "hybrid", "cache_slots": 7}, "--cache-slots 3"),
        (HYBRID + 256 * MIB, {"strategy": "offload"}, "--strategy hybrid"),
        (
            HYBRID + 512 * MIB,
            {"strategy": "hybrid", "kv_tokens": 20_000},
            "--kv-tokens 8192",  # 512 MiB less one slot are 128 pages beside the floor's
        ),
        (FUSED - PAGE, {"strategy": "fused"}, "--strategy hybrid"),
        (HYBRID, {"strategy": "hybrid"}, "--strategy cpu"),
        (FUSED, {"strategy": "fused", "gpu_memory_fraction": 0.5}, "--gpu-memory-fraction 1"),
        (MIB, {}, "--device cpu"),
    ],
)
def test_too_little_names_what_would_fit(free: int, options: dict[str, object], fits: str) -> None:
    with pytest.raises(CapacityError) as refused:
        settled(free, asked(**options))
    _, would_fit = str(refused.value).split("This would fit: ")
    assert fits in would_fit.split(", or ")
    assert "--kv-tokens 0" not in would_fit


NAMES = {
    "--cache-slots": ("cache_slots", int),
    "--kv-tokens": ("kv_tokens", int),
    "--gpu-memory-fraction": ("gpu_memory_fraction", float),
    "--strategy": ("strategy", str),
}


@settings(max_examples=300)
@given(
    free=st.integers(1 * MIB, 5 * GIB),
    strategy=st.sampled_from(["auto", "fused", "offload", "cpu", "hybrid"]),
    cache_slots=st.none() | st.integers(1, 8),
    kv_tokens=st.none() | st.integers(32, 40_000),
    fraction=st.floats(0.3, 1.0),
    dense=st.booleans(),
)
def test_every_advice_is_good(
    free: int,
    strategy: str,
    cache_slots: int | None,
    kv_tokens: int | None,
    fraction: float,
    dense: bool,
) -> None:
    facts = DENSE if dense else MOE
    config = EngineConfig(
        strategy=strategy,
        cache_slots=cache_slots,
        kv_tokens=kv_tokens,
        gpu_memory_fraction=fraction,
    )
    try:
        found = settled(free, config, facts)
    except ConfigError:
        assert strategy == "offload" and cache_slots == 1
        return
    except CapacityError as error:
        advice = re.findall(r"(--[a-z-]+) ([\w.]+)", str(error).split("This would fit: ")[1])
        assert advice[-1] == ("--device", "cpu")
        for option, value in advice[:-1]:
            name, kind = NAMES[option]
            settled(free, replace(config, **{name: kind(value)}), facts)
        return
    taken = facts.weight_bytes - facts.expert_bytes + activations(facts) + found.kv_pages * PAGE
    taken += (found.cache_slots or 0) * facts.slot_bytes
    if found.strategy in ("offload", "hybrid"):
        taken += 2 * facts.largest_layer_bytes
    assert taken <= free * fraction


def test_the_host_must_hold_what_the_gpu_fetches() -> None:
    little = Hardware(memory_bytes=2047 * MIB, gpu_bytes=HYBRID + 256 * MIB)
    with pytest.raises(CapacityError, match=r"takes 2\.00 GiB, and 2\.00 GiB.*--strategy cpu"):
        resolve(asked(strategy="hybrid"), MOE, little)
    for strategy in ("cpu", "hybrid"):
        enough = replace(little, memory_bytes=2048 * MIB)
        assert not resolve(asked(strategy=strategy), MOE, enough).notes
    # Mapped, they are read from disk again and again; those on the GPU need no host memory.
    (note,) = resolve(asked(strategy="cpu"), MOE, little).notes
    assert "read from disk" in note
    assert not resolve(asked(), MOE, replace(little, gpu_bytes=FUSED)).notes
