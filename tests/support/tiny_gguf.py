"""Write a tiny transformers model as a GGUF file, in the layout that llama.cpp reads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Q

from support.tiny_models import BYTE_SPECIALS, byte_tokens

Array = npt.NDArray[np.float32]

_ARCH = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@dataclass(frozen=True)
class TinyGguf:
    """`reference` is the float32 transformers model with exactly the weights of the file."""

    path: Path
    reference: Any


def write_gguf(
    model: Any,
    path: Path,
    *,
    expert_type: Q = Q.Q8_0,
    dense_type: Q = Q.F32,
    embedding_type: Q = Q.F32,
    per_expert: bool = False,
    rope_freqs: Array | None = None,
    tokenizer: bool = False,
    extra_keys: dict[str, tuple[Any, gguf.GGUFValueType]] | None = None,
    types: dict[str, Q] | None = None,
) -> TinyGguf:
    """Write `model` to `path`. Rows of quantised tensors must be whole blocks.

    `types` gives tensors whose transformers name contains its key another type (first match).
    `per_expert` writes one tensor per expert (`blk.N.ffn_gate.E.weight`), as files of early 2024
    do. `rope_freqs` is written as rope_freqs.weight. `extra_keys` without prefix get the
    architecture's.
    """
    reference = copy.deepcopy(model)
    config = model.config
    arch = _ARCH[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    _write_keys(writer, arch, config)
    for key, (value, value_type) in (extra_keys or {}).items():
        writer.add_key_value(f"{arch}.{key}", value, value_type)
    if tokenizer:
        _write_byte_tokenizer(writer, config.vocab_size)
    state = reference.state_dict()
    with torch.no_grad():
        for name, parameter in state.items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            special = [kind for key, kind in (types or {}).items() if key in name]
            usual = _type_of(name, parameter, expert_type, dense_type, embedding_type)
            type_ = special[0] if special else usual
            turned = arch == "gpt-oss" and parameter.dim() == 3  # [E, K, N] in transformers
            values = parameter.transpose(1, 2).contiguous() if turned else parameter
            stored = quantize(values.numpy(), type_)
            rounded = torch.from_numpy(dequantize(stored, type_).reshape(values.shape))
            parameter.copy_(rounded.transpose(1, 2) if turned else rounded)
            for gguf_name, data in _renamed(name, stored, config, arch, per_expert):
                _add(writer, gguf_name, data, type_)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyGguf(path, reference)


def quantize(values: Array, type_: Q) -> npt.NDArray[Any]:
    if type_ == Q.F32:
        return values.astype(np.float32)
    if type_ == Q.F16:
        return values.astype(np.float16)
    if type_ in _RANDOM:
        return random_blocks(values.shape, type_, float(values.std()))
    return gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), type_)


# Types that gguf.quants cannot write: where d (and dmin) lie in a block, as binary16, and what
# they are for numbers of about one, the other bytes being random.
_RANDOM: dict[Q, tuple[int, tuple[float, ...]]] = {
    Q.Q4_K: (0, (0.003, 0.023)),
    Q.Q5_K: (0, (0.0015, 0.023)),
    Q.Q6_K: (208, (0.00075,)),
    Q.NVFP4: (0, ()),
}


def random_blocks(shape: tuple[int, ...], type_: Q, size: float) -> npt.NDArray[np.uint8]:
    """Random blocks whose numbers are about `size`: uint8 [..., row bytes]."""
    elements, block_bytes = gguf.constants.GGML_QUANT_SIZES[type_]
    generator = np.random.default_rng([shape[-1], shape[0], type_])
    count = (*shape[:-1], shape[-1] // elements)
    blocks = generator.integers(0, 256, (*count, block_bytes), dtype=np.uint8)
    start, scales = _RANDOM[type_]
    for i, scale in enumerate(scales):
        values = (size * scale * generator.uniform(0.5, 1.5, count)).astype("<f2")
        blocks[..., start + 2 * i : start + 2 * i + 2] = values[..., None].view(np.uint8)
    if type_ == Q.NVFP4:  # e4m3: the exponent of about a third of the size, any mantissa
        exponent = 7 + round(np.log2(size / 3))
        blocks[..., :4] = 8 * exponent + generator.integers(0, 8, (*count, 4))
    return blocks.reshape(*shape[:-1], -1)


def dequantize(stored: npt.NDArray[Any], type_: Q) -> Array:
    if type_ in (Q.F32, Q.F16):
        return stored.astype(np.float32)
    return gguf.quants.dequantize(stored, type_)


def _add(writer: gguf.GGUFWriter, name: str, data: npt.NDArray[Any], type_: Q) -> None:
    raw = None if type_ in (Q.F32, Q.F16) else type_
    writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=raw)


def _type_of(name: str, parameter: torch.Tensor, expert: Q, dense: Q, embedding: Q) -> Q:
    if parameter.dim() == 1 or name.endswith(("mlp.gate.weight", "mlp.router.weight", "_bias")):
        return Q.F32
    if ".experts." in name:
        return expert
    return embedding if name in ("model.embed_tokens.weight", "lm_head.weight") else dense


def _renamed(
    name: str, stored: npt.NDArray[Any], config: Any, arch: str, per_expert: bool
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """GGUF names and data of one transformers tensor."""
    if name in _NAMES:
        yield _NAMES[name], stored
        return
    _, _, layer, rest = name.split(".", 3)
    if rest == "self_attn.sinks":
        yield f"blk.{layer}.attn_sinks.weight", stored
        return
    if arch == "gpt-oss" and rest.startswith("mlp.experts."):
        yield from _gpt_oss_experts(int(layer), rest, stored)
        return
    if rest.startswith("mlp.experts."):
        yield from _experts(int(layer), rest, stored, per_expert)
        return
    module, kind = rest.rsplit(".", 1)
    if arch == "llama" and module == "self_attn.q_proj":
        stored = interleave(stored, config.num_attention_heads)
    if arch == "llama" and module == "self_attn.k_proj":
        stored = interleave(stored, config.num_key_value_heads)
    stem = _LAYER_NAMES[module]
    if arch == "gpt-oss" and stem == "ffn_norm":
        stem = "post_attention_norm"
    yield f"blk.{layer}.{stem}.{kind}", stored


def _experts(
    layer: int, rest: str, stored: npt.NDArray[Any], per_expert: bool
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    if rest.endswith("gate_up_proj"):
        half = stored.shape[1] // 2
        parts = {"gate": stored[:, :half], "up": stored[:, half:]}
    else:
        parts = {"down": stored}
    for part, data in parts.items():
        if not per_expert:
            yield f"blk.{layer}.ffn_{part}_exps.weight", data
            continue
        for expert, one in enumerate(data):
            yield f"blk.{layer}.ffn_{part}.{expert}.weight", one


def _gpt_oss_experts(
    layer: int, rest: str, stored: npt.NDArray[Any]
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Rows (or numbers of a bias) of gate and up take turns."""
    kind = "bias" if rest.endswith("_bias") else "weight"
    if "gate_up_proj" in rest:
        yield f"blk.{layer}.ffn_gate_exps.{kind}", stored[:, 0::2]
        yield f"blk.{layer}.ffn_up_exps.{kind}", stored[:, 1::2]
    else:
        yield f"blk.{layer}.ffn_down_exps.{kind}", stored


def interleave(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Reorder the rows of each head from (first half, second half) to adjacent pairs: what the
    `llama` architecture of GGUF stores for Wq and Wk and their biases."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))


def _write_keys(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type in ("mixtral", "qwen3_moe", "gpt_oss"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch == "gpt-oss":
        rope = config.rope_parameters
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _write_byte_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    # The list of merges must not be empty in a GGUF file: one, whose result follows the specials.
    tokens = [*byte_tokens(), "he"]
    tokens += [f"<|unused{i}|>" for i in range(vocab - len(tokens))]
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    types = [normal if len(token) <= 2 else control for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(tokens.index(BYTE_SPECIALS[0]))
    writer.add_eos_token_id(tokens.index(BYTE_SPECIALS[1]))
    writer.add_add_bos_token(False)
    writer.add_chat_template(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
