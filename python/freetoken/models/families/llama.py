"""Llama, and Mistral, which is Llama with a sliding window. In GGUF both are `llama`."""

from __future__ import annotations

from freetoken.checkpoints.base import Checkpoint
from freetoken.models.families.common import (
    Family,
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

MISTRAL_WINDOW = 4096  # what transformers assumes where a Mistral config is silent


def _hf_spec(config: Fields) -> DecoderSpec:
    mlp = DenseMlpSpec(
        config.integer("intermediate_size"),
        hf_activation(config),
        bias=config.flag("mlp_bias", False),
    )
    return hf_decoder(
        config,
        family="llama",
        norm_eps=1e-6,
        theta=10000.0,
        mlps=(mlp,) * hf_layers(config),
        bias=config.flag("attention_bias", False),
    )


def _mistral_spec(config: Fields) -> DecoderSpec:
    said = "sliding_window" in config.values
    window = config.optional_integer("sliding_window") if said else MISTRAL_WINDOW
    layers = hf_layers(config)
    slides = hf_layer_types(config, layers) if config.has("layer_types") else [True] * layers
    if not all(slides):  # whether such a file means what it says is not agreed upon
        raise config.error("layer_types", expected="sliding_attention throughout, as Mistral has")
    mlp = DenseMlpSpec(config.integer("intermediate_size"), hf_activation(config), bias=False)
    return hf_decoder(
        config,
        family="llama",
        norm_eps=1e-6,
        theta=10000.0,
        mlps=(mlp,) * layers,
        windows=(window,) * layers,
    )


def _gguf_spec(checkpoint: Checkpoint, keys: Fields) -> DecoderSpec:
    return gguf_decoder(
        checkpoint,
        keys,
        family="llama",
        mlps=(gguf_dense(checkpoint, keys),) * gguf_layers(keys),
        interleaved=True,
    )


LLAMA = Family(_hf_spec, _gguf_spec)
MISTRAL = Family(_mistral_spec, _gguf_spec)
