"""What the loader refuses, and how it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file, save_file

from freetoken.checkpoints import open_checkpoint
from freetoken.errors import CheckpointError
from freetoken.models import Decoder, DenseMlpSpec, MoeSpec, load_decoder, read_spec
from support.decoding import Runner, relative_error
from support.ops_under_test import make_ops
from support.reference_ops import ReferenceOps
from support.tiny_gguf import write_gguf
from support.tiny_models import make_model, reference_logits, rewrite_config, save_hf, tiny_config

TOKENS = [5, 8, 13, 21]


def save(path: Path, family: str, **overrides: Any) -> Path:
    return save_hf(make_model(tiny_config(family, num_hidden_layers=2, **overrides)), path)


def edit(path: Path, **tensors: torch.Tensor | None) -> None:
    """Add, replace or (None) remove tensors of a saved checkpoint; "__" stands for a dot."""
    file = path / "model.safetensors"
    state = load_file(file)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    save_file(state, file)


def load(path: Path) -> Decoder:
    def make_moe(layers: Any, moe: Any) -> Any:
        raise AssertionError("nothing is built from a checkpoint that is refused")

    checkpoint = open_checkpoint(path)
    return load_decoder(checkpoint, read_spec(checkpoint), ReferenceOps(), make_moe)


def test_missing_misshapen_and_leftover_tensors_are_listed_together(tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    edit(
        tmp_path,
        model__layers__1__block_sparse_moe__experts__3__w2__weight=None,
        model__layers__0__self_attn__q_proj__weight=torch.zeros(60, 47),
        model__layers__0__self_attn__q_proj__lora_A=torch.zeros(3),
    )
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert "1 missing:\n    model.layers.1.block_sparse_moe.experts.3.w2.weight [48, 40]" in message
    assert "q_proj.weight: found [60, 47], expected [60, 48]" in message
    assert "1 not expected:\n    model.layers.0.self_attn.q_proj.lora_A" in message
    assert str(tmp_path) in message and "what to do" in message


def test_a_long_list_is_cut_and_counted(tmp_path: Path) -> None:
    save(tmp_path, "qwen3_moe")
    rewrite_config(tmp_path, hidden_size=50)
    with pytest.raises(CheckpointError, match=r"and \d+ more"):
        load(tmp_path)


def test_another_models_config_is_refused_without_listing_millions(tmp_path: Path) -> None:
    save(tmp_path, "qwen3_moe")
    rewrite_config(tmp_path, num_hidden_layers=4000, num_local_experts=60000)
    with pytest.raises(CheckpointError, match=r"999 missing"):
        load(tmp_path)


def test_a_dense_checkpoint_with_a_moe_config(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    rewrite_config(tmp_path, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(CheckpointError, match=r"block_sparse_moe\.gate\.weight \[4, 48\]"):
        load(tmp_path)


def test_tables_that_old_files_carry_are_ignored(tmp_path: Path) -> None:
    model = make_model(tiny_config("llama", num_hidden_layers=2, tie_word_embeddings=True))
    save_hf(model, tmp_path)
    edit(
        tmp_path,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(10),
        model__rotary_emb__inv_freq=torch.zeros(10),
        lm_head__weight=model.lm_head.weight.detach().clone(),
    )
    logits = Runner(tmp_path, make_ops("reference")).prefill(TOKENS)
    assert relative_error(logits, reference_logits(model, TOKENS)) < 1e-4


def test_an_untied_model_without_head_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    edit(tmp_path, lm_head__weight=None)
    with pytest.raises(CheckpointError, match=r"1 missing:\n    lm_head.weight \[101, 48\]"):
        load(tmp_path)


def test_experts_in_different_formats_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    name = "model__layers__0__block_sparse_moe__experts__2__w1__weight"
    edit(tmp_path, **{name: torch.zeros(40, 48, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match="different formats") as caught:
        load(tmp_path)
    assert "experts.2.w1.weight" in str(caught.value) and "BF16" in str(caught.value)


def test_expert_weights_are_views_of_the_map(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, "mixtral"))
    seen: list[Any] = []

    def make_moe(layers: Any, moe: MoeSpec) -> Any:
        seen.extend(layers)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_decoder(checkpoint, read_spec(checkpoint), ReferenceOps(), make_moe)
    assert [layer.layer_id for layer in seen] == [0, 1]
    entry = checkpoint.tensor("model.layers.1.block_sparse_moe.experts.4.w3.weight")
    assert seen[1].up.experts[4].ctypes.data == entry.data.ctypes.data


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        (
            "llama",
            {"model_type": "gpt_bigcode"},
            "one of gpt_oss, llama, mistral, mixtral, qwen3, qwen3_moe",
        ),
        ("llama", {"model_type": ...}, "no 'model_type'"),
        ("llama", {"hidden_act": "tanh"}, "silu or swish or gelu"),
        ("llama", {"num_attention_heads": "three"}, "an integer"),
        ("llama", {"num_hidden_layers": 10**9}, "from 1 to 4096"),
        ("llama", {"num_key_value_heads": 2}, "a divisor of the 3"),
        ("llama", {"head_dim": 21}, "even"),
        ("llama", {"rms_norm_eps": 0}, "above zero"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "mxfp4, modelopt"),
        ("llama", {"partial_rotary_factor": 0.5}, "full rotary"),
        ("mixtral", {"num_experts_per_tok": 6}, "from 1 to 5"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "true or false"),
        ("mistral", {"layer_types": ["full_attention"]}, "full_attention or"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "sliding_attention throughout"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["other"] * 2},
            "full_attention or sliding_attention",
        ),
    ],
)
def test_configs_that_are_refused(
    family: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save(tmp_path, family)
    rewrite_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_spec(open_checkpoint(tmp_path))
    assert "found:" in str(caught.value) and "what to do:" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("expert_gating_func", 2, "softmax"),
        ("expert_weights_scale", 3, "scaled expert weights"),
        ("expert_shared_count", 1, "shared experts"),
        ("logit_scale", 2, "logits"),
        ("rope.scaling.yarn_log_multiplier", 2, "context extension"),
    ],
)
def test_gguf_keys_that_are_refused(key: str, value: int, says: str, tmp_path: Path) -> None:
    keys = {key: (value, gguf.GGUFValueType.UINT32)}
    model = make_model(tiny_config("mixtral", num_hidden_layers=1))
    tiny = write_gguf(model, tmp_path / "m.gguf", expert_type=Q.F32, extra_keys=keys)
    with pytest.raises(CheckpointError, match=says):
        read_spec(open_checkpoint(tiny.path))


def test_a_gguf_of_another_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bert")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="bert") as caught:
        read_spec(open_checkpoint(tmp_path / "m.gguf"))
    assert "llama, qwen3, qwen3moe" in str(caught.value)


def test_specs_say_what_the_configs_say(tmp_path: Path) -> None:
    save(tmp_path, "qwen3_moe", mlp_only_layers=[0], norm_topk_prob=False)
    spec = read_spec(open_checkpoint(tmp_path))
    assert spec.mlps == (
        DenseMlpSpec(72, "silu", bias=False),
        MoeSpec(experts=7, top_k=3, intermediate=24, renormalize=False, activation="silu"),
    )
    assert (spec.family, spec.hidden, spec.vocab, spec.context_tokens) == (
        "qwen3_moe",
        48,
        101,
        512,
    )
    assert spec.attention.qk_norm and not spec.attention.qkv_bias
    assert spec.attention.scale == 20**-0.5


def test_gguf_llama_with_experts_is_mixtral(tmp_path: Path) -> None:
    model = make_model(tiny_config("mixtral", num_hidden_layers=1))
    spec = read_spec(
        open_checkpoint(write_gguf(model, tmp_path / "m.gguf", expert_type=Q.F32).path)
    )
    assert spec.family == "mixtral" and spec.rotary.interleaved
    assert spec.mlps == (MoeSpec(5, 2, 40, renormalize=True, activation="silu"),)
