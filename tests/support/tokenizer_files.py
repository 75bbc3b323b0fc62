# ruff: noqa: RUF001 (text in many scripts is the point)
"""Small tokenizers, trained on the spot, as GGUF metadata and as Hugging Face directories."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "It's what they're saying: we'll see if I'd have been there, wouldn't we? That's THE question.",
    "In 1984 there were 12345 people; by 2024 it was 3,141,592 or about 2.7% more.",
    "Der Fluß fließt über die Brücke, und die Mädchen hören schöne Lieder.",
    "L'été dernier, nous avons mangé des crêpes à la crème brûlée près du château.",
    "Привет, мир! Это простое предложение о собаке и лисице.",
    "日本語の文章です。中文句子也在这里，没有空格。",
    "नमस्ते दुनिया, यह एक वाक्य है।",
    "مرحبا بالعالم هذه جملة قصيرة",
    "def main(argv):\n    if len(argv) > 1:\n        print(argv[1])\n\n    return 0\n",
    "aaaa aaaaaaaa bbbbbb hahahaha   three   spaces    four",
    "emoji 😀 😀 👍🏽 👩‍👩‍👧 🏳️‍🌈 and 😀 again",
] * 4

TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    " \n\n \t x\r\n\r\ny  ",
    "Hello, world! The dog isn't lazy; it's QUICK.",
    "  leading and trailing  ",
    "a  b   c    d     e",
    "12 345 6789 3.14159 x2y3 ½ ² Ⅻ ١٢٣",
    "I'LL we'Re DON'T 's 'S 'ſ",
    "Der Fluß fließt. L'été à la crème brûlée.",
    "cafe\u0301 A\u030a",
    "Привет, мир! 日本語の文章です。中文句子 नमस्ते दुनिया مرحبا",
    "😀👍🏽👩‍👩‍👧🏳️‍🌈 not in the corpus: 🦀🇨🇭",
    "aaaaaaa aaaaaaaaaaaaa hahahahaha",
    "def f(x):\n\treturn x**2  # ok\n\n\n    pass",
    "camelCaseWord XMLHttpRequest snake_case /usr/bin//x\n/y",
    "\u00a0\u2003\u3000 wide\u200bspace\u2028line",
    "\x00\x01\x7f\ufffd\ufeff",
    "literal \u2581 and <0x41> and Ġ",
]

BYTE_LEVEL_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPM_USER_DEFINED = ("<sep>", "[tool]")


@dataclass
class FakeCheckpoint:
    """As much of a `Checkpoint` as tokenizers ask for."""

    kind: Literal["gguf", "safetensors"]
    path: Path = Path("model.gguf")
    metadata: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)


@cache
def trained_byte_level() -> str:
    """tokenizer.json of a byte-level BPE vocabulary whose words are cut as GPT-2 does."""
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=700,
        special_tokens=[AddedToken(token, special=True) for token in BYTE_LEVEL_SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    text: str = tokenizer.to_str()
    return text


def byte_level_metadata(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    """The same vocabulary as GGUF metadata. `changes` are keys without "tokenizer.ggml."."""
    described = json.loads(trained_byte_level())
    ids = dict(described["model"]["vocab"])
    kinds = {token_id: 1 for token_id in ids.values()}
    for token in described["added_tokens"]:
        ids[token["content"]] = token["id"]
        kinds[token["id"]] = 3 if token["special"] else 4
    metadata = {
        "model": "gpt2",
        "tokens": [token for token, _ in sorted(ids.items(), key=lambda item: item[1])],
        "token_type": [kind for _, kind in sorted(kinds.items())],
        "merges": [" ".join(merge) for merge in described["model"]["merges"]],
        "bos_token_id": ids["<|im_start|>"],
        "eos_token_id": ids["<|im_end|>"],
        **({} if pre is None else {"pre": pre}),
    }
    return _with_prefix(metadata, changes)


@cache
def trained_sentencepiece(
    byte_fallback: bool = True, rule: str = "identity", tidy: bool = False, kind: str = "bpe"
) -> bytes:
    """A serialized SentencePiece model. `tidy`: extra spaces are removed."""
    output = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in CORPUS for line in text.split("\n")),
        model_writer=output,
        model_type=kind,
        vocab_size=700 if kind == "bpe" else 450,
        byte_fallback=byte_fallback,
        character_coverage=0.98,
        normalization_rule_name=rule,
        remove_extra_whitespaces=tidy,
        user_defined_symbols=list(SPM_USER_DEFINED),
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    return output.getvalue()


def sentencepiece_metadata(model: bytes, **changes: Any) -> dict[str, Any]:
    """A SentencePiece model as GGUF metadata, as llama.cpp's converter writes it."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(processor.get_piece_size())
    metadata = {
        "model": "llama",
        "pre": "default",
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "token_type": [_piece_type(processor, i) for i in ids],
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
    }
    return _with_prefix(metadata, changes)


def _piece_type(processor: sentencepiece.SentencePieceProcessor, token_id: int) -> int:
    if processor.is_unknown(token_id):
        return 2
    if processor.is_control(token_id):
        return 3
    if processor.id_to_piece(token_id) in SPM_USER_DEFINED:
        return 4
    return 6 if processor.is_byte(token_id) else 1


def _with_prefix(metadata: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF keys; a change to None removes its key."""
    merged = {**metadata, **changes}
    return {f"tokenizer.ggml.{k}": v for k, v in merged.items() if v is not None}


def write_files(directory: Path, files: Iterable[tuple[str, str | bytes | dict[str, Any]]]) -> None:
    """Write text, bytes or JSON objects under their names."""
    for name, content in files:
        data = json.dumps(content) if isinstance(content, dict) else content
        encoded = data.encode("utf-8") if isinstance(data, str) else data
        (directory / name).write_bytes(encoded)
