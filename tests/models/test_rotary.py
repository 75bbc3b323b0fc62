"""Inverse frequencies against transformers, in both spellings of the config, and GGUF keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from freetoken.errors import CheckpointError
from freetoken.models.fields import Fields
from freetoken.models.rotary import gguf_rotary, hf_rotary, rotation
from freetoken.models.spec import RotarySpec
from support.tiny_models import tiny_config

HEAD_DIM, CONTEXT = 40, 4096

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn-attention": {**YARN, "attention_factor": 1.25},
    "yarn-mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
}


def from_config(**values: Any) -> RotarySpec:
    fields = Fields(values, Path("config.json"))
    return hf_rotary(fields, HEAD_DIM, context_tokens=CONTEXT, default_theta=7000.0)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_are_those_of_transformers(kind: str, spelling: str) -> None:
    rope = {"rope_theta": 20000.0, **SCALINGS[kind]}
    config = tiny_config(
        "llama", head_dim=HEAD_DIM, max_position_embeddings=CONTEXT, rope_parameters=dict(rope)
    )
    expected = LlamaRotaryEmbedding(config)
    if spelling == "rope_parameters":
        spec = from_config(rope_parameters=rope)
    else:
        old = {"type" if k == "rope_type" else k: v for k, v in SCALINGS[kind].items()}
        spec = from_config(rope_theta=20000.0, rope_scaling=old)
    assert spec.dims == HEAD_DIM and not spec.interleaved
    assert spec.attention_factor == pytest.approx(float(expected.attention_scaling), rel=1e-12)
    assert torch.equal(torch.tensor(spec.inverse_frequencies), expected.inv_freq)
    positions = torch.tensor([0, 1, 777, 4095], dtype=torch.int32)
    cos, sin = rotation(spec, expected.inv_freq, positions)
    wanted_cos, wanted_sin = expected(torch.zeros(1), positions[None])
    assert torch.equal(cos, wanted_cos[0, :, : HEAD_DIM // 2])
    assert torch.equal(sin, wanted_sin[0, :, : HEAD_DIM // 2])


def test_a_silent_config_has_the_familys_theta() -> None:
    assert from_config().inverse_frequencies == from_config(rope_theta=7000.0).inverse_frequencies
    assert from_config(rope_scaling=None).inverse_frequencies[1] == pytest.approx(7000**-0.05)


def test_yarn_without_factor_takes_the_ratio_of_contexts() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    assert from_config(rope_scaling=scaling) == from_config(rope_scaling=YARN)


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "default or linear or llama3 or yarn"),
        ({"type": "dynamic", "factor": 2.0}, "not supported"),
        ({"rope_type": "linear"}, "rope_scaling.factor"),
        ({"rope_type": "linear", "factor": -1}, "above zero"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "more than low_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "full rotary"),
    ],
)
def test_scalings_that_are_refused(scaling: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        from_config(rope_scaling=scaling)


class Tensors:
    """A checkpoint with rope_freqs.weight or without."""

    def __init__(self, factors: list[float] | None = None) -> None:
        self.factors = factors

    def __contains__(self, name: str) -> bool:
        return self.factors is not None and name == "rope_freqs.weight"

    def tensor(self, name: str) -> Any:
        from freetoken.checkpoints import TensorEntry
        from freetoken.formats import F32

        values = np.array(self.factors, np.float32)
        return TensorEntry(name, F32, values.shape, Path("m.gguf"), values.view(np.uint8))


def from_gguf(factors: list[float] | None = None, **values: Any) -> RotarySpec:
    fields = Fields(
        {key.replace("__", "."): value for key, value in values.items()}, Path("m.gguf"), "llama."
    )
    checkpoint: Any = Tensors(factors)
    return gguf_rotary(checkpoint, fields, 8, context_tokens=CONTEXT, interleaved=True)


def test_gguf_keys() -> None:
    plain = from_gguf(rope__freq_base=500.0)
    assert plain.interleaved and plain.dims == 8 and plain.attention_factor == 1.0
    assert plain.inverse_frequencies == pytest.approx([500 ** (-i / 4) for i in range(4)])
    partial = from_gguf(rope__dimension_count=4, rope__freq_base=500.0)
    assert partial.inverse_frequencies == pytest.approx([1.0, 500**-0.5])
    divided = from_gguf([1.0, 2.0, 4.0, 8.0], rope__freq_base=500.0)
    assert divided.inverse_frequencies == pytest.approx(
        [f / 2**i for i, f in enumerate(plain.inverse_frequencies)]
    )
    for keys in ({"rope__scale_linear": 4.0}, {"rope__scaling__factor": 4.0}):
        linear = from_gguf(rope__freq_base=500.0, **keys)
        assert linear.inverse_frequencies == pytest.approx(
            [f / 4 for f in plain.inverse_frequencies]
        )
    off = from_gguf(rope__freq_base=500.0, rope__scaling__type="none", rope__scaling__factor=4.0)
    assert off == plain


@pytest.mark.parametrize(
    ("factors", "keys", "says"),
    [
        (None, {"rope__scaling__type": "longrope"}, "none, linear or yarn"),
        (None, {"rope__scaling__yarn_ext_factor": 0.5}, "known rope.scaling key"),
        (None, {"rope__dimension_count": 10}, "even number up to 8"),
        (None, {"rope__dimension_count": 5}, "even number up to 8"),
        ([1.0, 2.0], {}, r"expected: \[4\]"),
        ([1.0, 2.0, 0.0, 1.0], {}, "above zero"),
        ([1.0, 2.0, float("nan"), 1.0], {}, "finite"),
    ],
)
def test_gguf_keys_that_are_refused(
    factors: list[float] | None, keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        from_gguf(factors, **keys)
