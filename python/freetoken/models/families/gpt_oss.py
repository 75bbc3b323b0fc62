"""gpt-oss: attention with sinks that slides in every other layer, and experts with biases and a
clamped SwiGLU. Query, key, value, output and router have biases; the router's weights are a softmax
over the chosen experts alone, which is the same as one over all, made to sum to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from freetoken.checkpoints.base import Checkpoint, TensorEntry
from freetoken.kernels.activations import ClampedSwiGlu
from freetoken.models.families.common import (
    Family,
    gguf_decoder,
    gguf_layers,
    hf_decoder,
    hf_layer_types,
    hf_layers,
    moe_spec,
)
from freetoken.models.fields import Fields
from freetoken.models.names import (
    GGUF_NAMES,
    HF_NAMES,
    ExpertBiases,
    ExpertSizes,
    FusedGateUpExperts,
    Shape,
    StackedExperts,
    TensorNames,
)
from freetoken.models.spec import DecoderSpec, MoeSpec
from freetoken.moe.store import Bytes, ExpertTensor

_MOST_SWIGLU = 1e6  # beyond it float32 overflows
# what transformers assumes where a config says nothing about rotary embeddings
_THETA = 150000.0
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class TransposedExperts:
    """gate and up in one tensor [E, H, 2 * I] of plain floats, the two in turn, and down [E, I, H].

    Neighbours in memory belong to different rows here, which no kernel can stream. So the weights
    are copied, once, into rows; checkpoints in MXFP4, the usual ones, are not laid out like this.
    """

    gate_up: str
    down: str

    def shapes(self, layer: int, sizes: ExpertSizes) -> Iterator[tuple[str, Shape]]:
        experts, hidden, inner = sizes.experts, sizes.hidden, sizes.intermediate
        yield self.gate_up.format(layer=layer), (experts, hidden, 2 * inner)
        yield self.down.format(layer=layer), (experts, inner, hidden)

    def parts(
        self, checkpoint: Checkpoint, layer: int, sizes: ExpertSizes
    ) -> tuple[ExpertTensor, ExpertTensor, ExpertTensor]:
        gate_up = checkpoint.tensor(self.gate_up.format(layer=layer))
        down = checkpoint.tensor(self.down.format(layer=layer))
        return (
            _transposed("gate", gate_up, sizes, slice(0, None, 2)),
            _transposed("up", gate_up, sizes, slice(1, None, 2)),
            _transposed("down", down, sizes, slice(None)),
        )


def _transposed(part: str, entry: TensorEntry, sizes: ExpertSizes, columns: slice) -> ExpertTensor:
    rows, cols = sizes.of(part)
    item_bytes = entry.format.block_bytes
    stored = entry.data.view(f"V{item_bytes}").reshape(entry.shape)

    def expert(matrix: np.ndarray[tuple[int, ...], np.dtype[np.void]]) -> Bytes:
        return np.ascontiguousarray(matrix[:, columns].T).view(np.uint8).reshape(rows, -1)

    return ExpertTensor(part, entry.format, rows, cols, tuple(map(expert, stored)))


_MLP = "model.layers.{layer}.mlp."
_PACKED_NAMES = replace(
    HF_NAMES,
    router=_MLP + "router.weight",
    sinks="model.layers.{layer}.self_attn.sinks",
    experts=(
        FusedGateUpExperts(
            gate_up=_MLP + "experts.gate_up_proj", down=_MLP + "experts.down_proj", interleaved=True
        ),
    ),
    expert_biases=ExpertBiases(
        gate_up=_MLP + "experts.gate_up_proj_bias", down=_MLP + "experts.down_proj_bias"
    ),
)
_PLAIN_NAMES = replace(
    _PACKED_NAMES,
    experts=(
        TransposedExperts(gate_up=_MLP + "experts.gate_up_proj", down=_MLP + "experts.down_proj"),
    ),
)
_GGUF_NAMES = replace(
    GGUF_NAMES,
    mlp_norm="blk.{layer}.post_attention_norm.weight",
    sinks="blk.{layer}.attn_sinks.weight",
    experts=(
        StackedExperts(
            gate="blk.{layer}.ffn_gate_exps.weight",
            up="blk.{layer}.ffn_up_exps.weight",
            down="blk.{layer}.ffn_down_exps.weight",
        ),
    ),
    expert_biases=ExpertBiases(
        gate="blk.{layer}.ffn_gate_exps.bias",
        up="blk.{layer}.ffn_up_exps.bias",
        down="blk.{layer}.ffn_down_exps.bias",
    ),
)


class GptOssFamily(Family):
    """Its plain and its quantised checkpoints have the same names for tensors of different
    layouts."""

    def names(self, checkpoint: Checkpoint) -> TensorNames:
        names = super().names(checkpoint)
        experts = _MLP.format(layer=0) + "experts.gate_up_proj"
        if checkpoint.kind == "gguf" or experts not in checkpoint:
            return names
        fmt = checkpoint.tensor(experts).format
        plain = fmt.block_elements == 1 and fmt.scale_block is None
        return _PLAIN_NAMES if plain else names


def _with_biases(moe: MoeSpec) -> MoeSpec:
    return replace(moe, router_bias=True, expert_bias=True)


def _hf_spec(config: Fields) -> DecoderSpec:
    config.require("hidden_act", ("silu",), "only gpt-oss's own activation is supported")
    layers = hf_layers(config)
    if config.has("layer_types"):
        slides = hf_layer_types(config, layers)
    else:
        slides = [layer % 2 == 0 for layer in range(layers)]
    window = config.integer("sliding_window", 128)
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = replace(config, values={**config.values, "rope_parameters": _ROPE})
    moe = moe_spec(
        config,
        experts="num_local_experts",
        top_k="num_experts_per_tok",
        intermediate="intermediate_size",
        renormalize=True,
        activation=ClampedSwiGlu(
            alpha=config.number("swiglu_alpha", 1.702, most=_MOST_SWIGLU),
            limit=config.number("swiglu_limit", 7.0, most=_MOST_SWIGLU),
        ),
    )
    return hf_decoder(
        config,
        family="gpt_oss",
        norm_eps=1e-5,
        theta=_THETA,
        mlps=(_with_biases(moe),) * layers,
        head_dim=64,
        windows=tuple(window if slide else None for slide in slides),
        bias=config.flag("attention_bias", True),
        sinks=True,
    )


def _gguf_spec(checkpoint: Checkpoint, keys: Fields) -> DecoderSpec:
    keys.require("expert_gating_func", (0, 1, 3), "only softmax routers are supported")
    moe = moe_spec(
        keys,
        experts="expert_count",
        top_k="expert_used_count",
        intermediate="expert_feed_forward_length",
        renormalize=True,
        activation=ClampedSwiGlu(),
    )
    return gguf_decoder(
        checkpoint,
        keys,
        family="gpt_oss",
        mlps=(_with_biases(moe),) * gguf_layers(keys),
        interleaved=False,
        sinks=True,
        slides=lambda layer: layer % 2 == 0,
        truncate_yarn=False,
    )


GPT_OSS = GptOssFamily(_hf_spec, _gguf_spec, hf_names=(_PACKED_NAMES,), gguf_names=_GGUF_NAMES)
