"""Random tiny checkpoints of every supported family, made with transformers.

`make_model` gives a float32 transformers model (the reference), `save_hf` writes it as a Hugging
Face directory in the layout that the hub has (one tensor per expert), `tiny_gguf.write_gguf` as a
GGUF file. Weights are scaled so that every activation is of order one: an error anywhere in the
decoder moves the logits.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FAMILIES = ("llama", "qwen3", "mixtral", "qwen3_moe")
MOE_FAMILIES = ("mixtral", "qwen3_moe")

transformers.utils.logging.disable_progress_bar()

_CONFIGS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"intermediate_size": 72}),
    "mistral": (transformers.MistralConfig, {"intermediate_size": 72, "sliding_window": None}),
    "qwen3": (transformers.Qwen3Config, {"intermediate_size": 72}),
    "mixtral": (
        transformers.MixtralConfig,
        {"intermediate_size": 40, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            "intermediate_size": 72,
            "moe_intermediate_size": 24,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "intermediate_size": 40,
            "num_local_experts": 6,
            "num_experts_per_tok": 4,
            "sliding_window": 4,
            "swiglu_limit": 1.5,  # low, so that both clamps are met
        },
    ),
}
_SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_config(family: str, **overrides: Any) -> Any:
    """A transformers config of a family: odd sizes by default, changed by `overrides`."""
    config_class, shape = _CONFIGS[family]
    return config_class(**{**_SHAPE, **shape, **overrides})


def make_model(config: Any, *, seed: int = 0, bf16_exact: bool = False) -> Any:
    """A float32 transformers model in eval mode with seeded weights.

    Norm weights lie around one, biases are non-zero, matrices have rows of norm about one. With
    `bf16_exact` every weight is a bfloat16 number, so that a BF16 file holds exactly this model.
    """
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                noise *= 0.3
            elif parameter.dim() == 1:
                noise = 1.0 + 0.3 * noise
            elif name.endswith("embed_tokens.weight"):
                noise *= 0.7
            else:
                noise *= 1.5 / parameter.shape[-1] ** 0.5
            parameter.copy_(noise.bfloat16().float() if bf16_exact else noise)
    return model


def save_hf(
    model: Any,
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = False,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a Hugging Face directory. With `tokenizer`, a byte-level one that suits a vocabulary of
    `BYTE_VOCAB` tokens or more."""
    saved = copy.deepcopy(model).to(dtype)
    saved.save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer:
        save_byte_tokenizer(directory)
    return directory


def rewrite_config(directory: Path, **changes: Any) -> None:
    """Change keys of a saved config.json; a value of ... (Ellipsis) removes the key."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


# A byte-level tokenizer without merges: token ids 0..255 are bytes in GPT-2's alphabet (sorted),
# then the two special tokens.
BYTE_SPECIALS = ("<|bos|>", "<|eos|>")
BYTE_VOCAB = 256 + len(BYTE_SPECIALS)


def byte_tokens() -> list[str]:
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *BYTE_SPECIALS]


def save_byte_tokenizer(directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json of the byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(byte_tokens())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(BYTE_SPECIALS))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BYTE_SPECIALS[0],
        "eos_token": BYTE_SPECIALS[1],
        "add_bos_token": False,
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """float32 [T, vocab] of one sequence, by transformers in float32."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.float()
