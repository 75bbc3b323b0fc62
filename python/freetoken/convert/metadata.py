"""The key-value pairs of the new file."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import gguf

from freetoken.checkpoints import open_checkpoint
from freetoken.checkpoints.base import Checkpoint
from freetoken.convert.rope import write_rope
from freetoken.convert.vocabulary import write_vocabulary
from freetoken.errors import CheckpointError
from freetoken.formats import WeightFormat
from freetoken.models import read_spec
from freetoken.models.spec import DecoderSpec, DenseMlpSpec, MoeSpec

_ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
}
_FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "Q4_K": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "Q5_K": gguf.LlamaFileType.MOSTLY_Q5_K_M,
    "Q6_K": gguf.LlamaFileType.MOSTLY_Q6_K,
    "MXFP4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
    "NVFP4": gguf.LlamaFileType.MOSTLY_NVFP4,
}
# What describes the old file alone.
_NOT_COPIED = ("general.file_type", "general.quantization_version", "general.alignment")


def write_metadata(
    checkpoint: Checkpoint, writer: gguf.GGUFWriter, expert_format: WeightFormat
) -> None:
    """Architecture, geometry and tokenizer: copied from a GGUF file, or told in GGUF's keys.

    Raises CheckpointError for what GGUF cannot express.
    """
    if checkpoint.kind == "gguf":
        _copy(checkpoint, writer)
    else:
        _describe(checkpoint, writer)
        write_vocabulary(checkpoint, writer)
    writer.add_file_type(_FILE_TYPES[expert_format.name])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _copy(checkpoint: Checkpoint, writer: gguf.GGUFWriter) -> None:
    for key, field in gguf.GGUFReader(checkpoint.path).fields.items():
        if key in _NOT_COPIED or key.startswith(("GGUF.", "split.")):
            continue
        kind, value = field.types[0], field.contents()
        if kind is not gguf.GGUFValueType.ARRAY:
            writer.add_key_value(key, value, kind)
        elif value:  # the writer refuses empty lists, which say no more than a key that is absent
            writer.add_key_value(key, value, kind, sub_type=field.types[-1])


def _describe(checkpoint: Checkpoint, writer: gguf.GGUFWriter) -> None:
    spec = read_spec(checkpoint)
    if spec.family not in _ARCHITECTURES:
        raise CheckpointError(
            "this architecture cannot be written as GGUF yet",
            file=checkpoint.path,
            found=spec.family,
            expected=f"one of {', '.join(_ARCHITECTURES)}",
            hint="use the checkpoint as it is, or a GGUF file of it as the source",
        )
    writer.arch = _ARCHITECTURES[spec.family]
    writer.add_string(gguf.Keys.General.ARCHITECTURE, writer.arch)
    writer.add_name(checkpoint.path.resolve().name)
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.context_tokens)
    writer.add_embedding_length(spec.hidden)
    writer.add_vocab_size(spec.vocab)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    attention = spec.attention
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    window = _common_window(checkpoint, spec)
    if window is not None:
        writer.add_sliding_window(window)
    write_rope(spec, checkpoint.path / "config.json", writer)
    _describe_mlps(checkpoint, spec, writer)


def _common_window(checkpoint: Checkpoint, spec: DecoderSpec) -> int | None:
    """The window of the layers that have one: which these are follows from the architecture."""
    if len(set(spec.windows)) > 1 and spec.family != "gpt_oss":
        raise CheckpointError(
            "layers with different attention windows cannot be mixed in a GGUF file of this "
            "architecture",
            file=checkpoint.path / "config.json",
            found=", ".join(map(str, spec.windows)),
            expected="the same window, or none, throughout",
            hint="use the checkpoint as it is",
        )
    return next((window for window in spec.windows if window is not None), None)


def check_described(checkpoint: Checkpoint, written: Path) -> None:
    """Read the new file's description back and compare it with the source's. Raises CheckpointError
    for whatever GGUF's keys could not say."""
    made = open_checkpoint(written)
    try:
        found = read_spec(made)
    finally:
        made.close()
    meant = read_spec(checkpoint)
    # The frequencies count, not the words for them: llama3's scaling becomes a tensor of factors.
    rotary = replace(
        meant.rotary, interleaved=found.rotary.interleaved, scaling=found.rotary.scaling
    )
    meant = replace(meant, rotary=rotary)
    for field in fields(meant):
        a, b = vars(meant)[field.name], vars(found)[field.name]
        if not _same(a, b):
            raise CheckpointError(
                "the model cannot be described in the keys of a GGUF file",
                file=checkpoint.path,
                found=f"{field.name}: {str(a)[:300]}",
                expected=f"what the keys can say: {str(b)[:300]}",
                hint="use the checkpoint as it is",
            )


def _same(a: object, b: object) -> bool:
    """Equal, but for the rounding of numbers to float32."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-5)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if is_dataclass(a) and type(a) is type(b):
        return all(_same(value, vars(b)[name]) for name, value in vars(a).items())
    return a == b


def _describe_mlps(checkpoint: Checkpoint, spec: DecoderSpec, writer: gguf.GGUFWriter) -> None:
    first = spec.mlps[0]
    if any(mlp != first for mlp in spec.mlps):
        raise CheckpointError(
            "layers with and without experts cannot be mixed in a GGUF file of this architecture",
            file=checkpoint.path / "config.json",
            found=f"{sum(isinstance(mlp, MoeSpec) for mlp in spec.mlps)} MoE layers of "
            f"{spec.layers}",
            expected="the same kind of layer throughout",
            hint="use the checkpoint as it is",
        )
    if isinstance(first, DenseMlpSpec):
        writer.add_feed_forward_length(first.intermediate)
        return
    writer.add_expert_count(first.experts)
    writer.add_expert_used_count(first.top_k)
    # Mixtral's one size is that of its experts; Qwen3-MoE's file also tells that of dense layers.
    writer.add_feed_forward_length(
        int(checkpoint.metadata.get("intermediate_size") or first.intermediate)
    )
    if spec.family != "mixtral":
        writer.add_expert_feed_forward_length(first.intermediate)
        if not first.renormalize:
            writer.add_expert_weights_norm(False)
