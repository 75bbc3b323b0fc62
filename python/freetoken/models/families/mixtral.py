"""Mixtral: Llama's attention, and in every layer a softmax router that renormalises its top_k.

In GGUF it is the `llama` architecture with an expert count.
"""

from __future__ import annotations

from dataclasses import replace

from freetoken.checkpoints.base import Checkpoint
from freetoken.models.families.common import (
    Family,
    check_gguf_router,
    gguf_decoder,
    gguf_layers,
    hf_activation,
    hf_decoder,
    hf_layers,
    moe_spec,
)
from freetoken.models.fields import Fields
from freetoken.models.names import HF_NAMES, SeparateExperts
from freetoken.models.spec import DecoderSpec

_MOE = "model.layers.{layer}.block_sparse_moe."
_HUB_NAMES = replace(
    HF_NAMES,
    router=_MOE + "gate.weight",
    experts=(
        SeparateExperts(
            gate=_MOE + "experts.{expert}.w1.weight",
            up=_MOE + "experts.{expert}.w3.weight",
            down=_MOE + "experts.{expert}.w2.weight",
        ),
    ),
)


def _hf_spec(config: Fields) -> DecoderSpec:
    experts = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    moe = moe_spec(
        config,
        experts=experts,
        top_k="num_experts_per_tok",
        intermediate="intermediate_size",
        renormalize=True,
        activation=hf_activation(config),
    )
    return hf_decoder(
        config,
        family="mixtral",
        norm_eps=1e-5,
        theta=1e6,
        mlps=(moe,) * hf_layers(config),
        windows=(config.optional_integer("sliding_window"),) * hf_layers(config),
    )


def _gguf_spec(checkpoint: Checkpoint, keys: Fields) -> DecoderSpec:
    check_gguf_router(keys)
    moe = moe_spec(
        keys,
        experts="expert_count",
        top_k="expert_used_count",
        intermediate="feed_forward_length",
        renormalize=True,
    )
    return gguf_decoder(
        checkpoint, keys, family="mixtral", mlps=(moe,) * gguf_layers(keys), interleaved=True
    )


MIXTRAL = Family(_hf_spec, _gguf_spec, hf_names=(_HUB_NAMES, HF_NAMES))
