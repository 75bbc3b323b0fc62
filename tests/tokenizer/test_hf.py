"""Hugging Face directories against transformers' AutoTokenizer."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer

from freetoken.errors import CheckpointError, RequestError
from freetoken.tokenizer import load_tokenizer
from freetoken.tokenizer.fast import FastEncoder, panics_explained
from support.tokenizer_files import (
    CORPUS,
    TEXTS,
    FakeCheckpoint,
    trained_byte_level,
    trained_sentencepiece,
    write_files,
)

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
}


def byte_level(**parts: Any) -> str:
    """The trained vocabulary with some components of its tokenizer.json replaced."""
    tokenizer = Tokenizer.from_str(trained_byte_level())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    text: str = tokenizer.to_str()
    return text


def metaspace(prepend: str, byte_fallback: bool) -> str:
    """A tokenizer.json of the SentencePiece kind, as Llama and Mixtral have it."""
    tokenizer = Tokenizer(BPE(byte_fallback=byte_fallback, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([] if prepend == "never" else [decoders.Strip(" ", 1, 0)])
    )
    specials = ["<unk>", "<s>", "</s>"]
    fallback = [AddedToken(f"<0x{b:02X}>", normalized=False) for b in range(256)]
    trainer = BpeTrainer(
        vocab_size=900,
        special_tokens=[AddedToken(token, special=True) for token in specials],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    described = json.loads(tokenizer.to_str())
    vocab = described["model"]["vocab"]
    for token in fallback if byte_fallback else []:
        vocab.setdefault(token.content, len(vocab))
    return json.dumps(described)


def directory(path: Path, *files: tuple[str, Any], model: dict[str, Any] | None = None):
    write_files(path, files)
    return load_tokenizer(FakeCheckpoint("safetensors", path=path, metadata=model or {}))


def bos_template(token: str = "<|im_start|>", token_id: int = 1) -> processors.PostProcessor:
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)]
    )


KINDS = {
    "byte-level": lambda: byte_level(),
    "byte-level, BOS": lambda: byte_level(post_processor=bos_template()),
    "byte-level, NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "metaspace, first": lambda: metaspace("first", True),
    "metaspace, always": lambda: metaspace("always", True),
    "metaspace, never": lambda: metaspace("never", True),
    "metaspace, no bytes": lambda: metaspace("first", False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_transformers(kind: str, tmp_path: Path):
    config = (
        CONFIG if kind.startswith("byte") else {**CONFIG, "bos_token": "<s>", "eos_token": "</s>"}
    )
    files = [("tokenizer.json", KINDS[kind]()), ("tokenizer_config.json", config)]
    tokenizer = directory(tmp_path, *files)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>\n", "a<s>b</s> c<think>d"]:
        ids = reference.encode(text)
        assert tokenizer.encode(text) == ids, repr(text)
        bare = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special=False) == bare
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special=skip) == expected, repr(text)
            stream = tokenizer.stream(skip_special=skip)
            assert "".join([*map(stream.push, ids), stream.flush()]) == expected
    assert tokenizer.bos_id == reference.bos_token_id
    assert tokenizer.eos_ids == {reference.eos_token_id}
    assert tokenizer.vocab_size == len(reference)


def test_truncation_and_padding_in_the_file_do_not_apply(tmp_path: Path):
    saved = Tokenizer.from_str(trained_byte_level())
    saved.enable_truncation(4)
    saved.enable_padding(length=64)
    tokenizer = directory(tmp_path, ("tokenizer.json", saved.to_str()))
    text = "The quick brown fox jumps over the lazy dog"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_of_the_config_alone_are_added(tmp_path: Path):
    size = Tokenizer.from_str(trained_byte_level()).get_vocab_size()
    added = {str(size): {"content": "<|tool|>", "special": False}}
    config = {**CONFIG, "pad_token": "<|pad|>", "added_tokens_decoder": added}
    files = [("tokenizer.json", trained_byte_level()), ("tokenizer_config.json", config)]
    tokenizer = directory(tmp_path, *files)
    assert tokenizer.encode("<|tool|><|pad|>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<|tool|>"
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("a <|tool|><|pad|> b") == reference.encode("a <|tool|><|pad|> b")


def test_an_added_token_with_another_id_is_refused(tmp_path: Path):
    config = {"added_tokens_decoder": {"5": {"content": "<|im_end|>"}}}
    files = [("tokenizer.json", trained_byte_level()), ("tokenizer_config.json", config)]
    with pytest.raises(CheckpointError, match=r"'<\|im_end\|>' another id[\s\S]*found:    5 in"):
        directory(tmp_path, *files)


def test_ends_are_those_of_all_files(tmp_path: Path):
    """The checkpoint has read generation_config.json, which nobody reads a second time."""
    files = [
        ("tokenizer.json", trained_byte_level()),
        ("tokenizer_config.json", CONFIG),
        ("generation_config.json", {"eos_token_id": 8}),
    ]
    write_files(tmp_path, files)
    checkpoint = FakeCheckpoint(
        "safetensors",
        path=tmp_path,
        metadata={"eos_token_id": 9},
        generation_config={"eos_token_id": [0, 7]},
    )
    assert load_tokenizer(checkpoint).eos_ids == {0, 2, 7, 9}


MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATES = [
    "{{ bos_token }}one",
    {"default": "{{ bos_token }}one", "rag": "two"},
    [
        {"name": "tool_use", "template": "two"},
        {"name": "default", "template": "{{ bos_token }}one"},
    ],
    [{"name": "only", "template": "{{ bos_token }}one"}],
]


@pytest.mark.parametrize("entry", TEMPLATES, ids=["text", "object", "list", "single"])
def test_forms_of_chat_template(entry: object, tmp_path: Path):
    config = {**CONFIG, "chat_template": entry}
    files = [("tokenizer.json", trained_byte_level()), ("tokenizer_config.json", config)]
    assert directory(tmp_path, *files).apply_chat(MESSAGES) == "<|im_start|>one"


def test_a_template_file_comes_before_the_config(tmp_path: Path):
    files = [
        ("tokenizer.json", trained_byte_level()),
        ("tokenizer_config.json", {**CONFIG, "chat_template": "config"}),
        ("chat_template.jinja", "file {{ eos_token }}"),
    ]
    assert directory(tmp_path, *files).apply_chat(MESSAGES) == "file <|im_end|>"


def test_several_templates_without_a_default_are_none(tmp_path: Path):
    config = {**CONFIG, "chat_template": {"a": "one", "b": "two"}}
    files = [("tokenizer.json", trained_byte_level()), ("tokenizer_config.json", config)]
    assert not directory(tmp_path, *files).has_chat_template


def test_a_single_file_finds_the_tokenizer_beside_it(tmp_path: Path):
    write_files(tmp_path, [("tokenizer.json", trained_byte_level()), ("model.safetensors", b"")])
    checkpoint = FakeCheckpoint("safetensors", path=tmp_path / "model.safetensors", metadata={})
    assert load_tokenizer(checkpoint).has_text


def test_a_directory_without_tokenizer_serves_token_ids_only(tmp_path: Path):
    model = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": [2, 3]}
    tokenizer = directory(tmp_path, model=model)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (50, 1, {2, 3})
    with pytest.raises(RequestError, match=r"has no tokenizer.*0 to 49"):
        tokenizer.encode("x")
    with pytest.raises(CheckpointError, match="neither a tokenizer nor the size"):
        directory(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"added_tokens_decoder": ["x"]},
        {"added_tokens_decoder": {"x": {"content": "y"}}},
        {"added_tokens_decoder": {"5": {}}},
        {"chat_template": 5},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": {"default": 5}},
    ],
    ids=str,
)
def test_odd_entries_of_the_config_are_named(entry: dict, tmp_path: Path):
    files = [("tokenizer.json", trained_byte_level()), ("tokenizer_config.json", entry)]
    with pytest.raises(
        CheckpointError, match=rf"{next(iter(entry))} cannot be read: .[\s\S]*found:"
    ):
        directory(tmp_path, *files)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([("tokenizer.json", "{")], r"tokenizer\.json: cannot be read as a tokenizer"),
        ([("tokenizer.json", "version https://git-lfs")], r"Git LFS pointer"),
        ([("vocab.json", "{}")], r"found:    vocab\.json[\s\S]*save_pretrained"),
        ([("tokenizer_config.json", "[]")], r"tokenizer_config\.json"),
        (
            [("tokenizer.json", byte_level(decoder=decoders.WordPiece()))],
            r"decodes tokens in a way[\s\S]*WordPiece[\s\S]*ByteLevel, Metaspace",
        ),
    ],
    ids=["json", "pointer", "old files", "config", "decoder"],
)
def test_unusable_files_are_refused(files: list, message: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=message):
        directory(tmp_path, *files)


def described_with(**changes: Any) -> str:
    """The trained tokenizer.json with another added token, or another entry of the vocabulary."""
    described = json.loads(trained_byte_level())
    if "vocab" in changes:
        described["model"]["vocab"]["zzz"] = changes["vocab"]
    if "added" in changes:
        described["added_tokens"].append({**described["added_tokens"][0], **changes["added"]})
    described.update(changes.get("parts", {}))
    return json.dumps(described)


@pytest.mark.parametrize("token_id", [1 << 22, 2**31 - 1, 2**31, 2**32 - 1])
def test_nothing_is_as_long_as_a_far_id_says(token_id: int, tmp_path: Path):
    """At eight bytes each, a table of 2**32 pieces would take 32 GiB."""
    far = described_with(vocab=token_id)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: .*\n.*the id {token_id};"):
        directory(tmp_path, ("tokenizer.json", far))
    added = described_with(added={"id": token_id, "content": "<far>"})
    size = directory(tmp_path, ("tokenizer.json", added)).vocab_size
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size < 1000 and peak_bytes < 20 << 20


@pytest.mark.parametrize("token_id", [-1, 1 << 22, 2**32, 2**63, 10**30])
def test_far_ids_of_the_config_are_refused(token_id: int, tmp_path: Path):
    added = {"added_tokens_decoder": {str(token_id): {"content": "<far>", "special": True}}}
    with pytest.raises(CheckpointError, match=str(token_id)):
        directory(
            tmp_path, ("tokenizer.json", trained_byte_level()), ("tokenizer_config.json", added)
        )
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=f"impossible id\n.*the id {token_id};"):
        directory(tmp_path, ("tokenizer.model", trained_sentencepiece()))


@pytest.mark.parametrize("surrogate", ["\ud800", "a\udfffb"])
@pytest.mark.parametrize("name", ["bos_token", "eos_token", "unk_token", "pad_token"])
def test_named_tokens_with_lone_surrogates_are_refused(name: str, surrogate: str, tmp_path: Path):
    for entry in (surrogate, {"content": surrogate}):
        config = json.dumps({name: entry})
        with pytest.raises(CheckpointError, match=rf"config\.json: {name} cannot be read"):
            directory(
                tmp_path,
                ("tokenizer.json", trained_byte_level()),
                ("tokenizer_config.json", config),
            )


@pytest.mark.parametrize("template", ["\ud800", "{{ '\\ud800' }}", "{{ bos_token }}\udfff"])
def test_a_template_that_writes_lone_surrogates_cannot_be_used(template: str, tmp_path: Path):
    config = json.dumps({"chat_template": template, "bos_token": "<|im_start|>"})
    tokenizer = directory(
        tmp_path, ("tokenizer.json", trained_byte_level()), ("tokenizer_config.json", config)
    )
    assert tokenizer.encode("plain prompts are served")
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode(tokenizer.apply_chat([{"role": "user", "content": "x"}]))


@pytest.mark.parametrize("content", [b"\xff\xfe{{ x }}", b"{{ x }}\xed\xa0\x80", b"caf\xe9"])
def test_a_template_that_is_not_utf8_is_named(content: bytes, tmp_path: Path):
    files = [("tokenizer.json", trained_byte_level()), ("chat_template.jinja", content)]
    with pytest.raises(CheckpointError, match=r"jinja: .* UTF-8\n +found: .* at byte \d"):
        directory(tmp_path, *files)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ],
    ids=["normalizer", "post-processor"],
)
def test_a_panic_of_the_library_is_an_error(parts: dict, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        directory(tmp_path, ("tokenizer.json", described_with(parts=parts)))


def test_a_panic_over_a_text_is_an_error_of_the_request():
    tokenizer = Tokenizer.from_str(
        described_with(
            parts={"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}}
        )
    )
    with pytest.raises(RequestError, match="fails on this text"):
        FastEncoder(tokenizer).encode("abc")


def test_what_is_no_panic_passes_through():
    with pytest.raises(KeyboardInterrupt), panics_explained(lambda error: RequestError("no")):
        raise KeyboardInterrupt
