"""Qwen3, dense: grouped-query attention with normalised queries and keys."""

from __future__ import annotations

from freetoken.checkpoints.base import Checkpoint
from freetoken.models.families.common import (
    Family,
    Windows,
    gguf_decoder,
    gguf_dense,
    gguf_layers,
    hf_activation,
    hf_decoder,
    hf_layer_types,
    hf_layers,
)
from freetoken.models.fields import Fields
from freetoken.models.spec import DecoderSpec, DenseMlpSpec


def _windows(config: Fields, layers: int) -> Windows | None:
    """`layer_types` says which layers slide; older configs say from which layer on."""
    if not config.flag("use_sliding_window", False) or not config.has("sliding_window"):
        return None
    window = config.integer("sliding_window")
    if config.has("layer_types"):
        slides = hf_layer_types(config, layers)
    else:
        first = config.integer("max_window_layers", 28, minimum=0)
        slides = [layer >= first for layer in range(layers)]
    return tuple(window if slide else None for slide in slides)


def _hf_spec(config: Fields) -> DecoderSpec:
    layers = hf_layers(config)
    mlp = DenseMlpSpec(config.integer("intermediate_size"), hf_activation(config), bias=False)
    return hf_decoder(
        config,
        family="qwen3",
        norm_eps=1e-6,
        theta=10000.0,
        mlps=(mlp,) * layers,
        head_dim=128,
        windows=_windows(config, layers),
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
