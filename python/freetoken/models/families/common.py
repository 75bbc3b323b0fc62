"""What the families share: attention, rotary and context keys of both kinds of checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from freetoken.checkpoints.base import Checkpoint
from freetoken.errors import CheckpointError
from freetoken.kernels.activations import Activation, ActivationName
from freetoken.models.fields import Fields
from freetoken.models.names import GGUF_NAMES, HF_NAMES, TensorNames, bias_of
from freetoken.models.rotary import gguf_rotary, hf_rotary
from freetoken.models.spec import AttentionSpec, DecoderSpec, DenseMlpSpec, MoeSpec

# What a sane file can say, so that a damaged one is refused before anything of that size is built.
MAX_LAYERS = 4096
MAX_EXPERTS = 65536
MAX_HEAD_DIM = 65536
_MOST_EPS = 1.0
_MOST_SCALE = 1000.0
Mlps = tuple[DenseMlpSpec | MoeSpec, ...]
Windows = tuple[int | None, ...]

_HF_ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class Family:
    """How to read the checkpoints of one architecture.

    `hf_spec` reads config.json, `gguf_spec` the GGUF keys. `hf_names` are the schemes that
    Hugging Face checkpoints use, the usual one first.
    """

    hf_spec: Callable[[Fields], DecoderSpec]
    gguf_spec: Callable[[Checkpoint, Fields], DecoderSpec]
    hf_names: tuple[TensorNames, ...] = (HF_NAMES,)
    gguf_names: TensorNames = GGUF_NAMES

    def names(self, checkpoint: Checkpoint) -> TensorNames:
        """The scheme that the checkpoint follows: schemes differ in the router's name."""
        if checkpoint.kind == "gguf":
            return self.gguf_names
        for names in self.hf_names:
            if names.router.format(layer=0) in checkpoint:
                return names
        return self.hf_names[0]


def hf_decoder(
    config: Fields,
    *,
    family: str,
    norm_eps: float,
    theta: float,
    mlps: Mlps,
    head_dim: int | None = None,
    windows: Windows | None = None,
    qk_norm: bool = False,
    bias: bool = False,
    sinks: bool = False,
) -> DecoderSpec:
    """A spec from config.json. `norm_eps`, `theta` and `head_dim` are the family's defaults where
    the config is silent (head_dim None: hidden / heads); `windows` None: no layer has one."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if config.has("head_dim") or head_dim is not None:
        head_dim = config.integer("head_dim", head_dim, maximum=MAX_HEAD_DIM)
    else:
        head_dim = _derived_head_dim(config, "hidden_size", hidden, heads)
    context = config.integer("max_position_embeddings", 2048)
    return DecoderSpec(
        family=family,
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        context_tokens=context,
        norm_eps=config.number("rms_norm_eps", norm_eps, most=_MOST_EPS),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        attention=AttentionSpec(
            heads=heads,
            kv_heads=_kv_heads(config, "num_key_value_heads", heads),
            head_dim=_even(config, "head_dim", head_dim),
            scale=head_dim**-0.5,
            qk_norm=qk_norm,
            qkv_bias=bias,
            output_bias=bias,
            sinks=sinks,
        ),
        rotary=hf_rotary(config, head_dim, context_tokens=context, default_theta=theta),
        mlps=mlps,
        windows=windows or (None,) * len(mlps),
    )


def gguf_decoder(
    checkpoint: Checkpoint,
    keys: Fields,
    *,
    family: str,
    mlps: Mlps,
    interleaved: bool,
    qk_norm: bool = False,
    sinks: bool = False,
    slides: Callable[[int], bool] = lambda layer: True,
    truncate_yarn: bool = True,
) -> DecoderSpec:
    """A spec from GGUF keys. `slides` says which layers have the window, if the file has one.
    Biases and a head of its own are there if the file has them: the format has no key for either.
    The vocabulary is as large as the embedding."""
    for key in ("logit_scale", "embedding_scale", "residual_scale"):
        keys.require(key, (0, 1), "scaled embeddings, residuals or logits are not supported")
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if keys.has("attention.key_length"):
        head_dim = keys.integer("attention.key_length", maximum=MAX_HEAD_DIM)
    else:
        head_dim = _derived_head_dim(keys, "embedding_length", hidden, heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.error("attention.value_length", expected=f"{head_dim}, the key length")
    context = keys.integer("context_length")
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    scale = keys.number("attention.scale", 0.0, positive=False, least=0.0, most=_MOST_SCALE)
    query = GGUF_NAMES.query.format(layer=0)
    output = GGUF_NAMES.output.format(layer=0)
    return DecoderSpec(
        family=family,
        hidden=hidden,
        vocab=_embedding_rows(checkpoint),
        context_tokens=context,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", most=_MOST_EPS),
        tied_embeddings=GGUF_NAMES.lm_head not in checkpoint,
        attention=AttentionSpec(
            heads=heads,
            kv_heads=_kv_heads(keys, "attention.head_count_kv", heads),
            head_dim=_even(keys, "attention.key_length", head_dim),
            scale=scale or head_dim**-0.5,
            qk_norm=qk_norm,
            qkv_bias=bias_of(query) in checkpoint,
            output_bias=bias_of(output) in checkpoint,
            sinks=sinks,
        ),
        rotary=gguf_rotary(
            checkpoint,
            keys,
            head_dim,
            context_tokens=context,
            interleaved=interleaved,
            truncate_yarn=truncate_yarn,
        ),
        mlps=mlps,
        windows=tuple((window or None) if slides(layer) else None for layer in range(len(mlps))),
    )


def hf_activation(config: Fields) -> ActivationName:
    """`hidden_act`, SiLU if the config is silent."""
    name = config.text("hidden_act", "silu")
    if name not in _HF_ACTIVATIONS:
        raise config.error("hidden_act", expected=" or ".join(_HF_ACTIVATIONS))
    return _HF_ACTIVATIONS[name]


def hf_layer_types(config: Fields, layers: int) -> list[bool]:
    """`layer_types`: whether each layer's attention slides."""
    kinds = config.array("layer_types")
    known = ("full_attention", "sliding_attention")
    if len(kinds) != layers or not all(kind in known for kind in kinds):
        raise config.error("layer_types", expected=f"{layers} of {' or '.join(known)}")
    return [kind == known[1] for kind in kinds]


def hf_layers(config: Fields) -> int:
    return config.integer("num_hidden_layers", maximum=MAX_LAYERS)


def gguf_layers(keys: Fields) -> int:
    return keys.integer("block_count", maximum=MAX_LAYERS)


def moe_spec(
    fields: Fields,
    *,
    experts: str,
    top_k: str,
    intermediate: str,
    renormalize: bool,
    activation: Activation = "silu",
) -> MoeSpec:
    """A MoE layer from the keys that hold its sizes."""
    count = fields.integer(experts, maximum=MAX_EXPERTS)
    return MoeSpec(
        experts=count,
        top_k=fields.integer(top_k, maximum=count),
        intermediate=fields.integer(intermediate),
        renormalize=renormalize,
        activation=activation,
    )


def gguf_dense(checkpoint: Checkpoint, keys: Fields) -> DenseMlpSpec:
    bias = bias_of(GGUF_NAMES.gate.format(layer=0)) in checkpoint
    return DenseMlpSpec(keys.integer("feed_forward_length"), "silu", bias)


def check_gguf_router(keys: Fields) -> None:
    """Refuse routers and experts that the softmax router does not describe."""
    keys.require("expert_gating_func", (0, 1), "only softmax routers are supported")
    keys.require("expert_weights_scale", (0, 1), "scaled expert weights are not supported")
    keys.require("expert_shared_count", (0,), "shared experts are not supported here")
    keys.require("expert_group_count", (0, 1), "grouped routing is not supported")


def _derived_head_dim(fields: Fields, key: str, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise fields.error(key, expected=f"a multiple of the {heads} heads, or a head size")
    if hidden // heads > MAX_HEAD_DIM:
        raise fields.error(key, expected=f"at most {MAX_HEAD_DIM} for each of the {heads} heads")
    return hidden // heads


def _even(fields: Fields, key: str, head_dim: int) -> int:
    if head_dim % 2:
        raise fields.error(key, expected=f"an even head size, not {head_dim}")
    return head_dim


def _kv_heads(fields: Fields, key: str, heads: int) -> int:
    kv_heads = fields.integer(key, heads)
    if heads % kv_heads:
        raise fields.error(key, expected=f"a divisor of the {heads} attention heads")
    return kv_heads


def _embedding_rows(checkpoint: Checkpoint) -> int:
    entry = checkpoint.tensor(GGUF_NAMES.embedding)
    if len(entry.shape) != 2:
        raise CheckpointError(
            "wrong shape",
            file=entry.file,
            tensor=entry.name,
            found=list(entry.shape),
            expected="[vocabulary, hidden size]",
            hint="the file is damaged; fetch or convert it again",
        )
    return entry.shape[0]
