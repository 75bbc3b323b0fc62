"""Settling the configuration."""

from __future__ import annotations

import dataclasses
import pwd
import re
from pathlib import Path
from typing import Any

import pytest

from freetoken.config import (
    CheckpointFacts,
    EngineConfig,
    Hardware,
    StrategyName,
    read_environment,
    resolve,
    resolve_slots,
)
from freetoken.errors import CapacityError, ConfigError
from freetoken.gpu_budget import DecoderSizes

GIB = 2**30
MOE = CheckpointFacts(
    weight_bytes=6 * GIB,
    expert_bytes=5 * GIB,
    experts=8,
    top_k=2,
    kv_bytes_per_token=100_000,
    context_tokens=4096,
    slot_bytes=5 * GIB // 8,
    largest_layer_bytes=GIB // 4,
    sizes=DecoderSizes(
        hidden=2048, vocab=32000, query=2048, key=512, expert=1024, experts=8, top_k=2
    ),
)
DENSE = dataclasses.replace(
    MOE,
    experts=0,
    top_k=0,
    expert_bytes=0,
    slot_bytes=0,
    largest_layer_bytes=0,
    sizes=DecoderSizes(hidden=2048, vocab=32000, query=2048, key=512, dense=8192),
)
NO_GPU = Hardware(memory_bytes=64 * GIB)


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        (NO_GPU, "cpu"),
        (Hardware(64 * GIB, gpu_bytes=24 * GIB), "fused"),
        (Hardware(64 * GIB, gpu_bytes=6 * GIB), "hybrid"),
    ],
)
def test_auto_suits_the_machine(hardware: Hardware, expected: str) -> None:
    assert resolve(EngineConfig(), MOE, hardware).strategy == expected


@pytest.mark.parametrize("strategy", ["fused", "offload", "cpu", "hybrid"])
def test_a_named_strategy_is_taken(strategy: str) -> None:
    assert resolve(EngineConfig(strategy=strategy), MOE, NO_GPU).strategy == strategy


def test_a_dense_model_has_no_strategy_and_says_so() -> None:
    resolved = resolve(EngineConfig(strategy="hybrid", cache_slots=3), DENSE, NO_GPU)
    assert resolved.strategy is None and resolved.cache_slots is None
    assert len(resolved.notes) == 2 and "dense" in resolved.notes[0]
    assert resolve(EngineConfig(), DENSE, NO_GPU).notes == ()


@pytest.mark.parametrize(
    ("strategy", "slots"), [("fused", 8), ("cpu", None), ("offload", 4), ("hybrid", 4)]
)
def test_default_slots(strategy: str, slots: int | None) -> None:
    assert resolve(EngineConfig(strategy=strategy), MOE, NO_GPU).cache_slots == slots


def test_default_slots_reach_the_minimum() -> None:
    facts = dataclasses.replace(MOE, experts=3, top_k=2)
    assert resolve(EngineConfig(strategy="offload"), facts, NO_GPU).cache_slots == 2


@pytest.mark.parametrize(
    ("strategy", "slots", "allowed"),
    [("offload", 1, "2 to 8"), ("offload", 9, "2 to 8"), ("hybrid", 9, "1 to 8")],
)
def test_slots_out_of_range_name_the_range(strategy: str, slots: int, allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed):
        resolve(EngineConfig(strategy=strategy, cache_slots=slots), MOE, NO_GPU)


@pytest.mark.parametrize(("strategy", "slots"), [("offload", 2), ("offload", 8), ("hybrid", 1)])
def test_slots_at_the_limits(strategy: str, slots: int) -> None:
    config = EngineConfig(strategy=strategy, cache_slots=slots)
    assert resolve(config, MOE, NO_GPU).cache_slots == slots


@pytest.mark.parametrize(
    ("strategy", "slots", "expected"),
    [
        ("offload", None, 4),
        ("offload", 2, 2),
        ("offload", 8, 8),
        ("hybrid", None, 4),
        ("hybrid", 1, 1),
        ("fused", None, 8),
        ("fused", 3, 8),
        ("cpu", 3, 0),
    ],
)
def test_slots_that_are_resolved(strategy: StrategyName, slots: int | None, expected: int) -> None:
    assert resolve_slots(strategy, slots, 8, 2) == expected


def test_the_default_is_never_below_the_minimum() -> None:
    assert resolve_slots("offload", None, 4, 3) == 3


@pytest.mark.parametrize(
    ("strategy", "slots", "message"),
    [
        ("offload", 1, "cache_slots is 1; the strategy offload needs 2 to 8 slots"),
        ("offload", 9, "2 to 8"),
        ("hybrid", 0, "cache_slots is 0; the strategy hybrid needs 1 to 8 slots"),
        ("hybrid", 9, "1 to 8"),
        ("hybrid", -1, "1 to 8"),
    ],
)
def test_wanted_slots_out_of_range_name_the_range(
    strategy: StrategyName, slots: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_slots(strategy, slots, 8, 2)


@pytest.mark.parametrize("experts", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("strategy", ["offload", "hybrid", "fused"])
def test_the_model_and_the_runtime_get_the_same_default(
    strategy: StrategyName, experts: int
) -> None:
    top_k = min(2, experts)
    facts = dataclasses.replace(MOE, experts=experts, top_k=top_k)
    settled = resolve(EngineConfig(strategy=strategy), facts, NO_GPU).cache_slots
    assert settled == resolve_slots(strategy, None, experts, top_k)


def test_options_without_effect_are_noted() -> None:
    notes = resolve(EngineConfig(strategy="cpu", cache_slots=2, max_fetch=1), MOE, NO_GPU).notes
    assert [note.split("=")[0] for note in notes] == ["cache_slots", "max_fetch"]
    used = EngineConfig(strategy="hybrid", cache_slots=2, max_fetch=0)
    resolved = resolve(used, MOE, NO_GPU)
    assert resolved.notes == () and resolved.max_fetch == 0


@pytest.mark.parametrize(
    ("facts", "strategy", "weights_gib"),
    [
        (DENSE, "auto", 6),  # mapped
        (MOE, "cpu", 6),  # mapped
        (MOE, "fused", 6),  # 1 mapped, 5 in slots
        (MOE, "offload", 8.5),  # 1 mapped, 5 packed, half of 5 in slots
        (MOE, "hybrid", 8.5),
    ],
)
def test_pages_use_at_most_half_of_what_the_weights_leave(
    facts: CheckpointFacts, strategy: str, weights_gib: float
) -> None:
    resolved = resolve(EngineConfig(strategy=strategy), facts, Hardware(memory_bytes=12 * GIB))
    used = (resolved.kv_pages - 1) * facts.kv_bytes_per_token * resolved.page_tokens
    half = (12 - weights_gib) / 2 * GIB
    assert 0.98 * half < used <= half


def test_pages_end_at_what_all_running_requests_can_use() -> None:
    resolved = resolve(EngineConfig(), MOE, Hardware(memory_bytes=10_000 * GIB))
    tokens = (resolved.kv_pages - 1) * resolved.page_tokens
    assert tokens == resolved.max_running * MOE.context_tokens


@pytest.mark.parametrize("strategy", ["cpu", "hybrid"])
def test_tokens_of_keys_and_values_as_asked(strategy: str) -> None:
    config = EngineConfig(strategy=strategy, kv_tokens=1000)
    assert resolve(config, MOE, NO_GPU).kv_pages == 33  # 1024 tokens, and page 0


def test_more_tokens_than_memory_holds_name_what_would() -> None:
    hardware = Hardware(memory_bytes=12 * GIB)
    with pytest.raises(CapacityError, match=r"leave 6\.00 GiB of 12\.00 GiB") as refused:
        resolve(EngineConfig(kv_tokens=70_000), MOE, hardware)
    found = re.search(r"--kv-tokens (\d+)", str(refused.value))
    assert found is not None
    fits = int(found[1])
    assert resolve(EngineConfig(kv_tokens=fits), MOE, hardware).kv_pages == fits // 32 + 1
    with pytest.raises(CapacityError):
        resolve(EngineConfig(kv_tokens=fits + 1), MOE, hardware)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [("cpu", "mapped, they may take 1.00 GiB of 4.00"), ("fused", "leave 0.0 MiB of 4.00")],
)
def test_more_tokens_than_fit_beside_weights_that_do_not(strategy: str, said: str) -> None:
    with pytest.raises(CapacityError, match=said):
        resolve(
            EngineConfig(strategy=strategy, kv_tokens=70_000), MOE, Hardware(memory_bytes=4 * GIB)
        )


def test_a_share_of_a_gpu_has_no_effect_without_one() -> None:
    (note,) = resolve(EngineConfig(gpu_memory_fraction=0.5), MOE, NO_GPU).notes
    assert note.startswith("gpu_memory_fraction=0.5 has no effect")
    hardware = Hardware(64 * GIB, gpu_bytes=64 * GIB)
    assert not resolve(EngineConfig(gpu_memory_fraction=0.5), MOE, hardware).notes


@pytest.mark.parametrize("facts", [DENSE, MOE])
def test_mapped_weights_beyond_memory_run_from_disk_and_say_so(facts: CheckpointFacts) -> None:
    resolved = resolve(EngineConfig(), facts, Hardware(memory_bytes=4 * GIB))
    assert any("read from disk" in note for note in resolved.notes)
    used = (resolved.kv_pages - 1) * facts.kv_bytes_per_token * resolved.page_tokens
    assert 0.45 * GIB < used <= 0.5 * GIB
    assert not resolve(EngineConfig(), facts, Hardware(memory_bytes=12 * GIB)).notes


@pytest.mark.parametrize(("strategy", "taken"), [("fused", "6.00 GiB"), ("hybrid", "8.50 GiB")])
def test_copied_weights_that_leave_no_memory_are_refused(strategy: str, taken: str) -> None:
    said = f"^6.00 GiB of memory.* take {taken}, .* use the cpu strategy"
    with pytest.raises(CapacityError, match=said):
        resolve(EngineConfig(strategy=strategy), MOE, Hardware(memory_bytes=6 * GIB))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strategy": "fast"}, "auto, fused, offload, cpu, hybrid"),
        ({"device": "tpu"}, "auto, cpu, cuda, rocm"),
        ({"cache_slots": 0}, "cache_slots .* at least 1"),
        ({"cache_slots": True}, "cache_slots"),
        ({"max_fetch": -1}, "max_fetch .* at least 0"),
        ({"threads": 0}, "threads .* at least 1"),
        ({"threads": 10**12}, "threads .* at most 1024"),
        ({"threads": "2"}, "threads"),
        ({"gpu_memory_fraction": 0.0}, r"gpu_memory_fraction is 0\.0 .*; .* above 0 and at most 1"),
        ({"gpu_memory_fraction": 1.01}, "gpu_memory_fraction"),
        ({"gpu_memory_fraction": float("nan")}, "gpu_memory_fraction is nan"),
        ({"gpu_memory_fraction": True}, "gpu_memory_fraction"),
        ({"gpu_memory_fraction": "half"}, "gpu_memory_fraction"),
        ({"kv_tokens": 31}, "kv_tokens .* at least 32"),
        ({"kv_tokens": 100.0}, "kv_tokens"),
    ],
)
def test_bad_options_say_what_is_allowed(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig(**options)


def test_environment_defaults() -> None:
    environment = read_environment({})
    assert environment.overlap and environment.home == Path("~/.cache/freetoken").expanduser()


def test_environment_is_read() -> None:
    environment = read_environment(
        {"FREETOKEN_HOME": "/tmp/models", "FREETOKEN_HYBRID_OVERLAP": "0"}
    )
    assert not environment.overlap and environment.home == Path("/tmp/models")
    assert read_environment({"XDG_CACHE_HOME": "/x"}).home == Path("/x/freetoken")


def test_no_home_folder_is_needed_until_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container whose user has neither a HOME nor an entry among the system's users."""

    def unknown(_user: object) -> None:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for variables, named, way_out in (
        ({}, "where HOME says", "or mend HOME"),
        ({"XDG_CACHE_HOME": "~/x"}, "where XDG_CACHE_HOME says", "or mend XDG_CACHE_HOME"),
        ({"FREETOKEN_HOME": "~/x"}, "where FREETOKEN_HOME says", "or unset it"),
    ):
        environment = read_environment(variables)
        assert environment.overlap
        with pytest.raises(ConfigError, match=named) as caught:
            _ = environment.home
        assert "set FREETOKEN_HOME to another folder" in str(caught.value)
        assert way_out in str(caught.value)


def test_a_relative_home_names_its_variable() -> None:
    for variable in ("FREETOKEN_HOME", "XDG_CACHE_HOME"):
        with pytest.raises(ConfigError, match=f"where {variable} says, 'some/where(.|\n)*relative"):
            _ = read_environment({variable: "some/where"}).home


def test_a_bad_environment_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="FREETOKEN_HYBRID_OVERLAP is 'maybe'"):
        read_environment({"FREETOKEN_HYBRID_OVERLAP": "maybe"})
