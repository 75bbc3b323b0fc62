"""Rotary embeddings: which inverse frequencies a checkpoint asks for.

Frequencies are computed in float32 with the operations that transformers uses, so that both agree
to the last bit at any position.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.checkpoints.base import Checkpoint
from freetoken.errors import CheckpointError, shown
from freetoken.models.fields import MAX_INTEGER, Fields
from freetoken.models.spec import RotaryScaling, RotarySpec

ROPE_FREQS = "rope_freqs.weight"
# What any model asks for and float32 can hold lies within these.
_MOST_THETA = 1e30
_LEAST_BETA, _MOST_BETA = 1e-6, 1e6
_LEAST_ATTENTION, _MOST_ATTENTION = 1e-3, 1e3
_SUPPORTED = ("default", "linear", "llama3", "yarn")


def hf_rotary(
    config: Fields, head_dim: int, *, context_tokens: int, default_theta: float
) -> RotarySpec:
    """From config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""
    if config.has("rope_parameters"):
        scaling: Fields | None = config.inside("rope_parameters")
    else:
        scaling = config.inside("rope_scaling") if config.has("rope_scaling") else None
    theta = _theta(config, "rope_theta", default_theta)
    for fields in (config, scaling):
        if fields is not None:
            fields.require(
                "partial_rotary_factor", (1, 1.0), "only full rotary embeddings are supported"
            )
    if scaling is None:
        return _spec(config, _plain(head_dim, theta), theta, RotaryScaling())
    theta = _theta(scaling, "rope_theta", theta)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    plain = _plain(head_dim, theta)
    if kind == "default":
        return _spec(scaling, plain, theta, RotaryScaling())
    if kind == "linear":
        linear = RotaryScaling("linear", scaling.number("factor"))
        return _spec(scaling, plain / linear.factor, theta, linear)
    original = scaling.integer("original_max_position_embeddings", context_tokens)
    if kind == "llama3":
        stretched = RotaryScaling("llama3", scaling.number("factor"), original)
        return _spec(scaling, _llama3(plain, scaling, original), theta, stretched)
    if kind == "yarn":
        factor = scaling.number("factor", context_tokens / original)
        betas = _betas(scaling, "beta_fast", "beta_slow")
        yarn = RotaryScaling("yarn", factor, original, *betas, scaling.flag("truncate", True))
        attention = _hf_yarn_attention(scaling, factor)
        return _spec(scaling, _yarn(plain, theta, yarn), theta, yarn, attention)
    raise scaling.error("rope_type", expected=" or ".join(_SUPPORTED), hint=_scaling_hint())


def gguf_rotary(
    checkpoint: Checkpoint,
    keys: Fields,
    head_dim: int,
    *,
    context_tokens: int,
    interleaved: bool,
    truncate_yarn: bool = True,
) -> RotarySpec:
    """From the rope.* keys, with the factors of rope_freqs.weight where the file has them. Whether
    YaRN's bounds are whole numbers is the model's choice; the format has no key for it."""
    dims = keys.integer("rope.dimension_count", head_dim)
    if dims > head_dim or dims % 2:
        raise keys.error("rope.dimension_count", expected=f"an even number up to {head_dim}")
    theta = _theta(keys, "rope.freq_base", 10000.0)
    _refuse_unknown_scaling(keys)
    plain = _plain(dims, theta)
    if ROPE_FREQS in checkpoint:
        plain = plain / _rope_factors(checkpoint, dims)
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    if kind == "none":
        spec = _spec(keys, plain, theta, RotaryScaling(), attention)
    elif kind == "linear":
        linear = RotaryScaling() if factor == 1 else RotaryScaling("linear", factor)
        spec = _spec(keys, plain / factor, theta, linear, attention)
    elif kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length", context_tokens)
        betas = _betas(keys, "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
        yarn = RotaryScaling("yarn", factor, original, *betas, truncate_yarn)
        attention *= _yarn_attention(factor, 1.0)
        spec = _spec(keys, _yarn(plain, theta, yarn), theta, yarn, attention)
    else:
        raise keys.error("rope.scaling.type", expected="none, linear or yarn", hint=_scaling_hint())
    return replace(spec, interleaved=interleaved)


def rotation(spec: RotarySpec, frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [T, R/2], of positions int32 [T]; `frequencies` float32 [R/2]."""
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos() * spec.attention_factor, angles.sin() * spec.attention_factor


def _theta(fields: Fields, key: str, default: float) -> float:
    """The base of the frequencies, which fall from 1."""
    theta = fields.number(key, default, most=_MOST_THETA)
    if not theta > 1:
        raise fields.error(key, expected="a number above 1")
    return theta


def _spec(
    fields: Fields,
    frequencies: Tensor,
    theta: float,
    scaling: RotaryScaling,
    attention_factor: float = 1.0,
) -> RotarySpec:
    """Every one of the keys may be a number, and together they may still give none."""
    values = tuple(float(f) for f in frequencies)
    usable = torch.isfinite(frequencies * MAX_INTEGER).all() and (frequencies > 0).all()
    if not usable or not _LEAST_ATTENTION <= attention_factor <= _MOST_ATTENTION:
        raise CheckpointError(
            "the keys of the rotary embedding give no usable frequencies",
            file=fields.file,
            found=f"frequencies from {min(values):g} to {max(values):g}, attention factor "
            f"{attention_factor:g}, of {_rotary_keys(fields)}",
            expected=f"frequencies above zero that float32 can hold, and a factor from "
            f"{_LEAST_ATTENTION:g} to {_MOST_ATTENTION:g}",
            hint="check that the file is complete and was written by a known converter",
        )
    return RotarySpec(
        2 * len(values),
        values,
        attention_factor,
        interleaved=False,
        theta=theta,
        scaling=scaling,
    )


def _rotary_keys(fields: Fields) -> str:
    """What the file says, for the error."""
    known = [key for key in fields.values if "rope" in fields.prefix or "rope" in key]
    return ", ".join(f"{fields.prefix}{key} = {shown(fields.values[key])}" for key in known[:8])


def _plain(dims: int, theta: float) -> Tensor:
    exponents = torch.arange(0, dims, 2, dtype=torch.int64).to(torch.float32) / dims
    return 1.0 / (theta**exponents)


def _llama3(plain: Tensor, scaling: Fields, original: int) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor = scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if not low < high:
        raise scaling.error("high_freq_factor", expected=f"more than low_freq_factor = {low}")
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > original / low, plain / factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, blended, stretched)


def _betas(fields: Fields, fast: str, slow: str) -> tuple[float, float]:
    return (
        fields.number(fast, 32.0, least=_LEAST_BETA, most=_MOST_BETA),
        fields.number(slow, 1.0, least=_LEAST_BETA, most=_MOST_BETA),
    )


def _yarn_bounds(dims: int, theta: float, scaling: RotaryScaling) -> tuple[float, float]:
    """Between which frequency indices YaRN blends."""

    def index(turns: float) -> float:
        wavelengths = scaling.original_context / (turns * 2 * math.pi)
        return dims * math.log(wavelengths) / (2 * math.log(theta))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dims - 1)


def _yarn(plain: Tensor, theta: float, scaling: RotaryScaling) -> Tensor:
    low, high = _yarn_bounds(2 * len(plain), theta, scaling)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(len(plain), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return plain / scaling.factor * (1 - kept) + plain * kept


def _yarn_attention(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _hf_yarn_attention(scaling: Fields, factor: float) -> float:
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor")
    mscale = scaling.number("mscale", 0.0, positive=False)
    mscale_all = scaling.number("mscale_all_dim", 0.0, positive=False)
    if mscale and mscale_all:
        whole = _yarn_attention(factor, mscale_all)
        if whole <= 0:
            raise scaling.error("mscale_all_dim", expected="a number above zero")
        return _yarn_attention(factor, mscale) / whole
    return _yarn_attention(factor, 1.0)


def _rope_factors(checkpoint: Checkpoint, dims: int) -> Tensor:
    entry = checkpoint.tensor(ROPE_FREQS)
    if entry.shape != (dims // 2,):
        raise CheckpointError(
            "wrong shape",
            file=entry.file,
            tensor=ROPE_FREQS,
            found=list(entry.shape),
            expected=[dims // 2],
            hint="the file is damaged, or was written for another head size",
        )
    factors: npt.NDArray[np.float32] = entry.dequantize()
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise CheckpointError(
            "rotary factors must be finite and above zero",
            file=entry.file,
            tensor=ROPE_FREQS,
            found=f"values from {factors.min()} to {factors.max()}",
            expected="finite numbers above zero",
            hint="the file is damaged; fetch or convert it again",
        )
    return torch.from_numpy(factors.copy())


_GGUF_SCALING_KEYS = {
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}


def _refuse_unknown_scaling(keys: Fields) -> None:
    for key in keys.values:
        if key.startswith("rope.scaling.") and key not in _GGUF_SCALING_KEYS:
            raise keys.error(key, expected="a known rope.scaling key", hint=_scaling_hint())


def _scaling_hint() -> str:
    return "this kind of context extension is not supported; use a checkpoint without it"
