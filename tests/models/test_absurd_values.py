"""Numbers and kinds that no config means: refused by name, before anything is built with them."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freetoken.checkpoints import open_checkpoint
from freetoken.checkpoints.base import Checkpoint
from freetoken.errors import CheckpointError
from freetoken.models.families import HF_FAMILIES
from freetoken.models.fields import Fields
from freetoken.models.loader import read_spec
from freetoken.models.spec import DecoderSpec, MoeSpec
from support.tiny_gguf import write_gguf
from support.tiny_models import make_model, tiny_config

HF = ("llama", "mistral", "mixtral", "qwen3", "qwen3_moe", "gpt_oss")
NO_SCALARS: list[Any] = [1.5, math.nan, True, "8", [], [1, 2], [[1]], {}, {"a": 1}, [None], [True]]
NO_SIZES: list[Any] = [0, -1, -(2**63), 2**31, 2**32, 2**63, 2**64, 10**30, *NO_SCALARS]
NO_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, True, "1", [], [1.0], {}]
ABSURD: list[Any] = [
    *(0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, 10**99),
    *(1.5, -0.5, 1e38, 1e308, 1e-308, 5e-324, math.nan, math.inf, -math.inf),
    *(True, False, None, "", "x", "8", [], [1], [1, 2], [[1]], [None], {}, {"a": 1}),
]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


@cache
def hf_values(family: str) -> dict[str, Any]:
    values: dict[str, Any] = tiny_config(family).to_dict()
    return values


def hf_spec(family: str, **changes: Any) -> DecoderSpec:
    values = {**hf_values(family), **changes}
    return HF_FAMILIES[family].hf_spec(Fields(values, Path("config.json")))


def check_usable(spec: DecoderSpec) -> None:
    """What the kernels count on."""
    attention, rotary = spec.attention, spec.rotary
    sizes = [spec.hidden, spec.vocab, spec.context_tokens, attention.heads, attention.kv_heads]
    sizes += [attention.head_dim, *(mlp.intermediate for mlp in spec.mlps)]
    sizes += [window for window in spec.windows if window is not None]
    assert all(type(size) is int and 0 < size < 2**31 for size in sizes), sizes
    assert all(m.top_k <= m.experts for m in spec.mlps if isinstance(m, MoeSpec))
    last = torch.tensor(rotary.inverse_frequencies) * float(2**31)
    assert last.isfinite().all() and (last > 0).all(), rotary
    assert 1e-4 < rotary.attention_factor < 1e4
    assert 0 < spec.norm_eps <= 1 and 0 < attention.scale <= 1000


def refused(family: str, key: str, value: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        hf_spec(family, **{key: value})
    message = str(caught.value)
    assert "found:" in message and "expected:" in message and "what to do:" in message
    assert len(message) < 1000
    return message


@pytest.mark.parametrize("value", NO_SIZES, ids=repr)
@pytest.mark.parametrize(
    "key",
    [
        "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "num_local_experts",
        "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
    ],
)  # fmt: skip
def test_a_size_is_a_whole_number_within_reason(key: str, value: Any) -> None:
    message = refused("qwen3_moe", key, value)
    assert repr(key) in message and type(value).__name__ in message


@pytest.mark.parametrize("value", [0, -1, 2**31, 2**63, 2**64, *NO_SCALARS], ids=repr)
@pytest.mark.parametrize("family", ["mistral", "mixtral", "gpt_oss"])
def test_a_window_is_a_whole_number_within_reason(family: str, value: Any) -> None:
    assert "'sliding_window'" in refused(family, "sliding_window", value)


@pytest.mark.parametrize("value", [2**16 + 2, 2**30, 2**31 - 2], ids=repr)
def test_a_head_of_thousands_of_numbers_is_refused(value: int) -> None:
    assert "from 1 to 65536" in refused("llama", "head_dim", value)
    values = {"head_dim": None, "hidden_size": value, "num_attention_heads": 1}
    with pytest.raises(CheckpointError, match="at most 65536 for each of the 1 heads"):
        hf_spec("llama", **values, num_key_value_heads=1)


@pytest.mark.parametrize("value", [0, -1e-5, 1.5, 1e30, *NO_NUMBERS], ids=repr)
def test_a_norms_epsilon_is_small(value: Any) -> None:
    assert "'rms_norm_eps'" in refused("llama", "rms_norm_eps", value)


@pytest.mark.parametrize("value", [0, 1, 0.5, -1, 1e31, 10**99, *NO_NUMBERS], ids=repr)
def test_a_theta_is_above_one(value: Any) -> None:
    message = refused("llama", "rope_parameters", {"rope_type": "default", "rope_theta": value})
    assert "'rope_parameters.rope_theta'" in message


@pytest.mark.parametrize("value", [0, -1, 1e308, 1e-308, *NO_NUMBERS], ids=repr)
@pytest.mark.parametrize("rope", [LINEAR, YARN, LLAMA3], ids=lambda rope: rope["rope_type"])
def test_a_factor_is_one_that_frequencies_bear(rope: dict[str, Any], value: Any) -> None:
    assert "rope_parameters.factor" in refused(
        "llama", "rope_parameters", {**rope, "factor": value}
    )


@pytest.mark.parametrize("value", [0, -1, 1e-7, 1e7, 1e308, [32.0, 1.0], *NO_NUMBERS], ids=repr)
@pytest.mark.parametrize("key", ["beta_fast", "beta_slow"])
def test_a_beta_is_a_number_of_turns(key: str, value: Any) -> None:
    assert f"'rope_parameters.{key}'" in refused("llama", "rope_parameters", {**YARN, key: value})


@pytest.mark.parametrize(
    "change",
    [{"mscale": 1e30}, {"mscale": -20.0}, {"mscale_all_dim": -20.0}, {"attention_factor": 1e30},
     {"mscale_all_dim": -1 / (0.1 * math.log(4.0))}],
    ids=repr,
)  # fmt: skip
def test_yarns_attention_factor_stays_within_reason(change: dict[str, float]) -> None:
    assert "rope_parameters." in refused("llama", "rope_parameters", {**YARN, **change})


@pytest.mark.parametrize("value", [[[1]], [None], [True], ["1"], [1.0], 1, {}], ids=repr)
def test_the_dense_layers_are_numbered(value: Any) -> None:
    assert "'mlp_only_layers'" in refused("qwen3_moe", "mlp_only_layers", value)


@pytest.mark.parametrize("family", HF)
def test_any_value_of_any_key_is_refused_or_usable(family: str) -> None:
    values = hf_values(family)
    keys = [*values, "rope_scaling", "rope_theta", "max_window_layers", "mlp_only_layers"]
    absurd = 0
    tracemalloc.start()
    try:
        for key in keys:
            with_window = {"use_sliding_window": True} if key == "sliding_window" else {}
            absurd += sum(_is_usable(family, {key: v, **with_window}) for v in ABSURD)
        ropes = sum(
            _is_usable(family, {"rope_parameters": {**rope, key: value}})
            for rope in (LINEAR, YARN, LLAMA3)
            for key in rope
            for value in ABSURD
        )
        assert tracemalloc.get_traced_memory()[1] < 64 << 20  # nothing large was built
    finally:
        tracemalloc.stop()
    # Some of the values are fine, and most keys are not read: configs were not refused throughout.
    assert absurd > len(keys) and ropes > 20


def _is_usable(family: str, changes: dict[str, Any]) -> bool:
    try:
        spec = hf_spec(family, **changes)
    except CheckpointError as error:
        assert len(str(error)) < 3000, changes
        return False
    check_usable(spec)
    return True


GGUF_ABSURD: list[Any] = [
    *(0, -1, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1),
    *(1.5, -0.5, 3e38, 1e308, 1e-308, math.nan, math.inf),
    *(True, False, "", "8", [], ["a"], [["a"]]),
    *(np.array([1]), np.array([1, 2]), np.array([], np.int32), np.array([1.5]), np.array([True])),
    np.array([2**63], np.uint64),
]
GGUF_KEYS = (
    "attention.sliding_window", "attention.scale", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.attn_factor", "rope.scaling.original_context_length", "rope.scale_linear",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "expert_gating_func",
    "expert_weights_scale", "expert_shared_count", "expert_group_count", "expert_weights_norm",
    "logit_scale",
)  # fmt: skip


class Changed:
    """A checkpoint with other metadata."""

    def __init__(self, checkpoint: Checkpoint, metadata: dict[str, Any]) -> None:
        self.kind, self.path = checkpoint.kind, checkpoint.path
        self.tensor = checkpoint.tensor
        self.checkpoint = checkpoint
        self.metadata = {**checkpoint.metadata, **metadata}

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint


@pytest.fixture(scope="module", params=["llama", "mixtral", "qwen3_moe", "gpt_oss"])
def gguf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    config = tiny_config(
        request.param, hidden_size=96, intermediate_size=96, moe_intermediate_size=96
    )
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(make_model(config), path)
    checkpoint = open_checkpoint(path)
    yield checkpoint
    checkpoint.close()


def test_any_value_of_any_gguf_key_is_refused_or_usable(gguf: Any) -> None:
    prefix = f"{gguf.metadata['general.architecture']}."
    keys = {key for key in gguf.metadata if key.startswith(prefix)}
    keys |= {"general.architecture", *(prefix + key for key in GGUF_KEYS)}
    usable = 0
    for scaling in ({}, {prefix + "rope.scaling.type": "yarn"}):
        for key in sorted(keys):
            for value in GGUF_ABSURD:
                try:
                    spec = read_spec(Changed(gguf, {**scaling, key: value}))  # type: ignore[arg-type]
                except CheckpointError as error:
                    assert len(str(error)) < 3000, (key, value)
                else:
                    check_usable(spec)
                    usable += 1
    assert usable > 20  # some of the values are fine: the keys were read at all


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("embedding_length", 2**31), ("attention.head_count", 2**63), ("block_count", 2**31 - 1),
        ("attention.key_length", 2**31 - 1), ("context_length", 2**63),
        ("rope.freq_base", 1.0), ("rope.freq_base", math.nan), ("rope.freq_base", 3e38),
        ("attention.layer_norm_rms_epsilon", -1.0), ("attention.layer_norm_rms_epsilon", math.nan),
        ("attention.layer_norm_rms_epsilon", 2.0), ("attention.sliding_window", 2**63),
        ("attention.scale", -1.0), ("attention.scale", 1e30), ("rope.scaling.factor", 0.0),
        ("rope.scaling.factor", math.inf), ("rope.scaling.factor", 1e300),
        ("embedding_length", np.array([96, 95])), ("embedding_length", True),
        ("rope.freq_base", np.array([1e4, 1e4])), ("logit_scale", np.array([1, 1])),
    ],
)  # fmt: skip
def test_gguf_keys_that_are_refused_by_name(gguf: Any, key: str, value: Any) -> None:
    prefix = f"{gguf.metadata['general.architecture']}."
    with pytest.raises(CheckpointError) as caught:
        read_spec(Changed(gguf, {prefix + key: value}))  # type: ignore[arg-type]
    assert prefix + key in str(caught.value)


def test_the_sweep_would_see_an_unusable_spec() -> None:
    spec = hf_spec("mixtral")
    check_usable(spec)
    for wrong in (
        replace(spec, hidden=2**31),
        replace(spec, windows=(2**63,)),
        replace(spec, norm_eps=1e30),
        replace(spec, rotary=replace(spec.rotary, inverse_frequencies=(math.inf,))),
    ):
        with pytest.raises(AssertionError):
            check_usable(wrong)
