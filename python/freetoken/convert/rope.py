"""Rotary embeddings of a config.json as GGUF keys, or as the tensor of factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from freetoken.checkpoints.base import Checkpoint
from freetoken.errors import CheckpointError
from freetoken.formats.base import Float32
from freetoken.models import read_spec

_YARN_LOG = 0.1  # readers multiply cos and sin by 1 + 0.1 * ln(factor) of themselves


def write_rope(checkpoint: Checkpoint, writer: gguf.GGUFWriter) -> None:
    """The keys from which the checkpoint's frequencies follow. Raises CheckpointError for a scaling
    that GGUF has no keys for."""
    spec = read_spec(checkpoint).rotary
    writer.add_rope_dimension_count(spec.dims)
    writer.add_rope_freq_base(_theta(checkpoint))
    kind, scaling = _scaling(checkpoint)
    if kind in ("default", "llama3"):
        return
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(scaling["factor"]))
        return
    # GGUF leaves it to the architecture whether YaRN's bounds are whole numbers.
    truncates = read_spec(checkpoint).family != "gpt_oss"
    if kind != "yarn" or scaling.get("truncate", True) is not truncates:
        raise CheckpointError(
            "a rotary scaling that cannot be written",
            file=checkpoint.path / "config.json",
            found=f"rope_type {kind!r}, truncate {scaling.get('truncate', True)}",
            expected=f"default, linear, llama3, or yarn with truncate {truncates}",
            hint="GGUF files have no keys for this one; use the checkpoint as it is",
        )
    original = int(scaling.get("original_max_position_embeddings") or _context(checkpoint))
    factor = float(scaling.get("factor") or _context(checkpoint) / original)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(original)
    for name, write in (
        ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
        ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
    ):
        if scaling.get(name) is not None:
            write(float(scaling[name]))
    usual = 1.0 if factor <= 1 else 1.0 + _YARN_LOG * float(np.log(factor))
    if abs(spec.attention_factor / usual - 1) > 1e-6:
        writer.add_rope_scaling_attn_factors(spec.attention_factor / usual)


def rope_factors(checkpoint: Checkpoint) -> Float32 | None:
    """What each plain frequency is divided by: llama3's scaling has a tensor instead of keys."""
    kind, _ = _scaling(checkpoint)
    if kind != "llama3":
        return None
    spec = read_spec(checkpoint).rotary
    exponents = np.arange(0, spec.dims, 2, dtype=np.float32) / np.float32(spec.dims)
    plain = np.float32(1) / np.float32(_theta(checkpoint)) ** exponents
    factors: Float32 = (plain / np.array(spec.inverse_frequencies, np.float32)).astype(np.float32)
    return factors


def _scaling(checkpoint: Checkpoint) -> tuple[str, Mapping[str, Any]]:
    config = checkpoint.metadata
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return scaling.get("rope_type", scaling.get("type", "default")), scaling


def _theta(checkpoint: Checkpoint) -> float:
    """`read_spec` has checked that it is a number; where the config is silent, from the spec."""
    _, scaling = _scaling(checkpoint)
    for place in (scaling, checkpoint.metadata):
        if place.get("rope_theta") is not None:
            return float(place["rope_theta"])
    spec = read_spec(checkpoint).rotary
    if spec.dims < 4:
        return 1.0
    # The second plain frequency is theta^(-2 / dims); no scaling touches frequencies that high.
    return float(round(spec.inverse_frequencies[1] ** (-spec.dims / 2)))


def _context(checkpoint: Checkpoint) -> int:
    return read_spec(checkpoint).context_tokens
