"""What a decoder is made of, as data. A family turns a checkpoint's config into one of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freetoken.kernels.activations import Activation


@dataclass(frozen=True)
class RotaryScaling:
    """How a context was extended, as the checkpoint says it or its family assumes.

    `original_context` and what follows are of YaRN: between the turns `beta_fast` and `beta_slow`
    in a context of so many tokens it blends, the bounds being whole numbers with `truncate`.
    """

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class RotarySpec:
    """Rotary embedding: inverse frequencies, the factor on cos and sin, and the pairing. `theta`
    and `scaling` are what the frequencies were computed from; the factors that a GGUF file may have
    in a tensor come on top."""

    dims: int
    inverse_frequencies: tuple[float, ...]
    attention_factor: float
    interleaved: bool
    theta: float
    scaling: RotaryScaling


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    sinks: bool = False  # one learned logit per query head in the softmax


@dataclass(frozen=True)
class MoeSpec:
    """A router and its experts."""

    experts: int
    top_k: int
    intermediate: int
    renormalize: bool
    activation: Activation
    router_bias: bool = False
    expert_bias: bool = False


@dataclass(frozen=True)
class DenseMlpSpec:
    """A gated feed-forward layer."""

    intermediate: int
    activation: Activation
    bias: bool


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer. `mlps` and `windows` have one entry per layer; a window is the
    number of positions that attention sees (None: all)."""

    family: str
    hidden: int
    vocab: int
    context_tokens: int
    norm_eps: float
    tied_embeddings: bool
    attention: AttentionSpec
    rotary: RotarySpec
    mlps: tuple[DenseMlpSpec | MoeSpec, ...]
    windows: tuple[int | None, ...]

    @property
    def layers(self) -> int:
        return len(self.mlps)
