"""Qwen3-MoE: Qwen3's attention; MoE layers, between which some may be dense."""

from __future__ import annotations

from freetoken.checkpoints.base import Checkpoint
from freetoken.models.families.common import (
    Family,
    Mlps,
    check_gguf_router,
    gguf_decoder,
    gguf_layers,
    hf_activation,
    hf_decoder,
    hf_layers,
    moe_spec,
)
from freetoken.models.fields import Fields
from freetoken.models.spec import DecoderSpec, DenseMlpSpec, MoeSpec


def _mlps(config: Fields) -> Mlps:
    """Layer i is MoE if it is not in mlp_only_layers and decoder_sparse_step divides i + 1."""
    step = config.integer("decoder_sparse_step", 1)
    dense_layers = config.array("mlp_only_layers") if config.has("mlp_only_layers") else []
    if not all(type(layer) is int for layer in dense_layers):
        raise config.error("mlp_only_layers", expected="an array of layer numbers")
    moe = moe_spec(
        config,
        experts="num_local_experts" if config.has("num_local_experts") else "num_experts",
        top_k="num_experts_per_tok",
        intermediate="moe_intermediate_size",
        renormalize=config.flag("norm_topk_prob", False),
        activation=hf_activation(config),
    )

    def mlp(layer: int) -> DenseMlpSpec | MoeSpec:
        if layer in dense_layers or (layer + 1) % step:
            return DenseMlpSpec(
                config.integer("intermediate_size"), hf_activation(config), bias=False
            )
        return moe

    return tuple(mlp(layer) for layer in range(hf_layers(config)))


def _hf_spec(config: Fields) -> DecoderSpec:
    sliding = config.flag("use_sliding_window", False)
    window = config.optional_integer("sliding_window") if sliding else None
    return hf_decoder(
        config,
        family="qwen3_moe",
        norm_eps=1e-6,
        theta=10000.0,
        mlps=_mlps(config),
        windows=(window,) * hf_layers(config),
        qk_norm=True,
        bias=config.flag("attention_bias", False),
    )


def _gguf_spec(checkpoint: Checkpoint, keys: Fields) -> DecoderSpec:
    check_gguf_router(keys)
    moe = moe_spec(
        keys,
        experts="expert_count",
        top_k="expert_used_count",
        intermediate="expert_feed_forward_length",
        renormalize=keys.flag("expert_weights_norm", True),
    )
    return gguf_decoder(
        checkpoint,
        keys,
        family="qwen3_moe",
        mlps=(moe,) * gguf_layers(keys),
        interleaved=False,
        qk_norm=True,
    )


QWEN3_MOE = Family(_hf_spec, _gguf_spec)
