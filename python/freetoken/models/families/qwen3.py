"""Qwen3, dense: grouped-query attention with normalised queries and keys."""

from __future__ import annotations

from freetoken.checkpoints.base import Checkpoint
from freetoken.models.families.common import (
    Family,
    gguf_decoder,
    gguf_dense,
    gguf_layers,
    hf_decoder,
    hf_layers,
    one_window,
)
from freetoken.models.fields import Fields
from freetoken.models.spec import DecoderSpec, DenseMlpSpec

_KINDS = ("full_attention", "sliding_attention")


def _window(config: Fields, layers: int) -> int | None:
    """`layer_types` says which layers slide; older configs say from which layer on."""
    if not config.flag("use_sliding_window", False) or not config.has("sliding_window"):
        return None
    window = config.integer("sliding_window")
    if config.has("layer_types"):
        kinds = config.array("layer_types")
    else:
        first = config.integer("max_window_layers", 28, minimum=0)
        kinds = [_KINDS[layer >= first] for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= set(_KINDS):
        raise config.error("layer_types", expected=f"{layers} of {' or '.join(_KINDS)}")
    return one_window(config, [window if kind == _KINDS[1] else None for kind in kinds])


def _hf_spec(config: Fields) -> DecoderSpec:
    layers = hf_layers(config)
    mlp = DenseMlpSpec(config.integer("intermediate_size"), "silu", bias=False)
    return hf_decoder(
        config,
        family="qwen3",
        norm_eps=1e-6,
        theta=10000.0,
        mlps=(mlp,) * layers,
        head_dim=128,
        window=_window(config, layers),
        qk_norm=True,
        bias=config.flag("attention_bias", False),
    )


def _gguf_spec(checkpoint: Checkpoint, keys: Fields) -> DecoderSpec:
    return gguf_decoder(
        checkpoint,
        keys,
        family="qwen3",
        mlps=(gguf_dense(checkpoint, keys),) * gguf_layers(keys),
        interleaved=False,
        qk_norm=True,
    )


QWEN3 = Family(_hf_spec, _gguf_spec)
