"""Rotary embeddings of a config.json as GGUF keys, or as the tensor of factors."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np

from freetoken.errors import CheckpointError
from freetoken.formats.base import Float32
from freetoken.models.spec import DecoderSpec, RotarySpec

_YARN_LOG = 0.1  # readers multiply cos and sin by 1 + 0.1 * ln(factor) of themselves


def write_rope(spec: DecoderSpec, config: Path, writer: gguf.GGUFWriter) -> None:
    """The keys from which the frequencies of `spec`, read from the file `config`, follow. Raises
    CheckpointError for a scaling that GGUF has no keys for."""
    rotary, scaling = spec.rotary, spec.rotary.scaling
    writer.add_rope_dimension_count(rotary.dims)
    writer.add_rope_freq_base(rotary.theta)
    if scaling.kind in ("default", "llama3"):
        return
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        return
    # GGUF leaves it to the architecture whether YaRN's bounds are whole numbers.
    truncates = spec.family != "gpt_oss"
    if scaling.truncate is not truncates:
        raise CheckpointError(
            "a rotary scaling that cannot be written",
            file=config,
            found=f"yarn with truncate {scaling.truncate}",
            expected=f"default, linear, llama3, or yarn with truncate {truncates}",
            hint="GGUF files have no keys for this one; use the checkpoint as it is",
        )
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_orig_ctx_len(scaling.original_context)
    writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
    writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
    usual = 1.0 if scaling.factor <= 1 else 1.0 + _YARN_LOG * math.log(scaling.factor)
    if abs(rotary.attention_factor / usual - 1) > 1e-6:
        writer.add_rope_scaling_attn_factors(rotary.attention_factor / usual)


def rope_factors(rotary: RotarySpec) -> Float32 | None:
    """What each plain frequency is divided by: llama3's scaling has a tensor instead of keys."""
    if rotary.scaling.kind != "llama3":
        return None
    exponents = np.arange(0, rotary.dims, 2, dtype=np.float32) / np.float32(rotary.dims)
    plain = np.float32(1) / np.float32(rotary.theta) ** exponents
    factors: Float32 = (plain / np.array(rotary.inverse_frequencies, np.float32)).astype(np.float32)
    return factors
