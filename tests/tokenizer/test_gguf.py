"""Byte-level BPE from GGUF metadata, against the pre-tokenizers of the models' own files."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers

from freetoken.errors import CheckpointError, RequestError
from freetoken.tokenizer import Tokenizer, load_tokenizer
from freetoken.tokenizer.bytelevel import BYTE_TO_CHAR, token_bytes
from freetoken.tokenizer.pretokenizers import PRE_TOKENIZERS
from support.tokenizer_files import (
    TEXTS,
    FakeCheckpoint,
    byte_level_metadata,
    trained_byte_level,
)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def load(pre: str | None = "gpt-2", **changes: object) -> Tokenizer:
    return load_tokenizer(FakeCheckpoint("gguf", metadata=byte_level_metadata(pre, **changes)))


def family_tokenizer(steps: list, normalizer: object = None) -> tokenizers.Tokenizer:
    """The trained vocabulary with the pre-tokenizer that a family's tokenizer.json has."""
    tokenizer = tokenizers.Tokenizer.from_str(trained_byte_level())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
FAMILIES = {
    "gpt-2": ([GPT2], None),
    "smollm": ([pre_tokenizers.Digits(individual_digits=True), GPT2], None),
    "dbrx": ([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES], None),
    "qwen2": ([pre_tokenizers.Split(Regex(QWEN2), "isolated"), BYTES], normalizers.NFC()),
}


@pytest.mark.parametrize("pre", FAMILIES)
def test_ids_are_those_of_the_familys_own_tokenizer(pre: str):
    reference = family_tokenizer(*FAMILIES[pre])
    for text in TEXTS:
        expected = reference.encode(text, add_special_tokens=False).ids
        assert load(pre).encode(text) == expected, repr(text)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.sampled_from(["smollm"]))
def test_any_text_gives_the_familys_ids(text: str, pre: str):
    reference = family_tokenizer(*FAMILIES[pre])
    assert load(pre).encode(text) == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", [name for name, pre in PRE_TOKENIZERS.items() if not pre.composes])
def test_every_pre_tokenizer_loses_nothing(pre: str):
    for text in TEXTS:
        ids = load(pre).encode(text, add_special=False)
        assert load(pre).decode(ids, skip_special=False) == text


def test_qwen_text_is_composed():
    assert load("qwen2").encode("cafe\u0301") == load("qwen2").encode("caf\u00e9")


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_decoding_and_streaming_give_the_text_back(text: str):
    tokenizer = load("llama-bpe")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join([*map(stream.push, ids), stream.flush()]) == text


SPLITS = {
    "default": ("a 12345 x?!", ["a", " ", "123", "45", " x", "?!"]),
    "llama-bpe": ("it'S 12345 x?!\n\ny", ["it", "'S", " ", "123", "45", " x", "?!\n\n", "y"]),
    "qwen2": ("it'S 123", ["it", "'S", " ", "1", "2", "3"]),
    "smollm": ("it's 12", ["it", "'s", " ", "1", "2"]),
    "tekken": ("camelCase HTTP 12/\n", ["camel", "Case", " HTTP", " ", "1", "2", "/\n"]),
    "gpt-4o": ("we'RE camelCase 1234", ["we'RE", " camel", "Case", " ", "123", "4"]),
    # ":-~" among DeepSeek's marks holds the ASCII letters too: they are cut from other letters.
    "deepseek-llm": (
        "ab\u00e9 \u4e2d\u65871 x!\n",
        ["ab", "\u00e9", " ", "\u4e2d\u6587", "1", " x", "!", "\n"],
    ),
    "deepseek-coder": ("ab? 12\n", ["ab", "?", " ", "1", "2", "\n"]),
    "deepseek-v3": ("x\u4e2d\u65871234 .com", ["x", "\u4e2d\u6587", "123", "4", " .", "com"]),
}


@pytest.mark.parametrize("pre", SPLITS)
def test_words_are_cut_as_the_family_cuts_them(pre: str):
    text, expected = SPLITS[pre]
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in PRE_TOKENIZERS[pre].patterns]
    assert [word for word, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)] == expected


def test_special_tokens_in_the_text_become_their_ids():
    tokenizer = load()
    metadata = byte_level_metadata()
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    text = "<|im_start|>a<|im_end|><think>"
    expected = [ids["<|im_start|>"], ids["a"], ids["<|im_end|>"], ids["<think>"]]
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == "a<think>"
    assert tokenizer.decode(expected, skip_special=False) == text


def test_ends_are_the_eos_the_eot_and_end_of_turn_marks():
    ids = {token: i for i, token in enumerate(byte_level_metadata()["tokenizer.ggml.tokens"])}
    marks = {ids["<|im_end|>"], ids["<|endoftext|>"]}
    assert load().eos_ids == marks
    assert load(eot_token_id=ids["a"], eom_token_id=ids["b"]).eos_ids == marks | {
        ids["a"],
        ids["b"],
    }


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, (0, 0)),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, (1, 1)),
        ("llama-bpe", {}, (1, 0)),
        ("llama-bpe", {"add_bos_token": False}, (0, 0)),
    ],
)
def test_what_is_added_around_a_text(pre: str, flags: dict, expected: tuple[int, int]):
    tokenizer = load(pre, **flags)
    bare = tokenizer.encode("dog", add_special=False)
    metadata = byte_level_metadata()
    before = [metadata["tokenizer.ggml.bos_token_id"]] * expected[0]
    after = [metadata["tokenizer.ggml.eos_token_id"]] * expected[1]
    assert tokenizer.encode("dog") == [*before, *bare, *after]


def test_whole_words_come_before_merges_where_the_family_says_so():
    tokens = [*byte_level_metadata()["tokenizer.ggml.tokens"], "zqzq"]
    types = [*byte_level_metadata()["tokenizer.ggml.token_type"], 1]
    changes = {"tokens": tokens, "token_type": types}
    metadata = {pre: byte_level_metadata(pre, **changes) for pre in ("llama-bpe", "dbrx")}
    loaded = {p: load_tokenizer(FakeCheckpoint("gguf", metadata=m)) for p, m in metadata.items()}
    assert loaded["llama-bpe"].encode("zqzq", add_special=False) == [len(tokens) - 1]
    assert len(loaded["dbrx"].encode("zqzq", add_special=False)) == 4


def test_numpy_arrays_and_missing_types_are_read_too():
    types = np.array(byte_level_metadata()["tokenizer.ggml.token_type"], dtype=np.int32)
    metadata = byte_level_metadata(token_type=types)
    loaded = load_tokenizer(FakeCheckpoint("gguf", metadata=metadata))
    assert loaded.encode("<|im_end|>") == load().encode("<|im_end|>")
    untyped = load_tokenizer(FakeCheckpoint("gguf", metadata=byte_level_metadata(token_type=None)))
    assert untyped.encode("The dog") == load().encode("The dog")


def test_a_missing_pre_tokenizer_is_the_default_with_a_warning(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(FakeCheckpoint("gguf", metadata=byte_level_metadata(None)))
    assert "tokenizer.ggml.pre" in caplog.text
    assert tokenizer.encode("12345?!") == load("default").encode("12345?!")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"found:    'bert'[\s\S]*expected: gpt2"),
        ({"pre": "made-up"}, r"found:    'made-up'[\s\S]*llama-bpe[\s\S]*tokenizer\.json"),
        ({"merges": None}, r"merges is missing"),
        ({"merges": ["zzz yyy"]}, r"merges does not fit the vocabulary"),
        ({"merges": ["ab"]}, r"merges does not fit the vocabulary"),
        ({"bos_token_id": None, "add_bos_token": True}, r"add_bos_token is set, but"),
        ({"eos_token_id": -1}, r"eos_token_id is outside the vocabulary"),
        ({"eos_token_id": "</s>"}, r"eos_token_id has the wrong type[\s\S]*expected: int"),
        ({"model": np.zeros(3)}, r"model has the wrong type[\s\S]*expected: str"),
        ({"add_bos_token": 1}, r"add_bos_token has the wrong type[\s\S]*expected: bool"),
        ({"pre": ["a"]}, r"pre has the wrong type"),
        ({"tokens": "abc"}, r"tokens is missing or no array[\s\S]*found:    str"),
        (
            {"token_type": ["x"] * len(byte_level_metadata()["tokenizer.ggml.tokens"])},
            r"token_type has an item that is no number",
        ),
    ],
)
def test_unusable_metadata_are_refused(changes: dict, message: str):
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(FakeCheckpoint("gguf", metadata=byte_level_metadata(**changes)))


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(RequestError, match=r"lone surrogate '\\ud800' at position 2"):
        load().encode("ab\ud800")


def test_the_chat_template_sees_the_named_tokens():
    metadata = byte_level_metadata()
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokenizer = load_tokenizer(FakeCheckpoint("gguf", metadata=metadata))
    assert tokenizer.has_chat_template
    prompt = tokenizer.apply_chat([{"role": "user", "content": "hi"}])
    assert prompt == "<|im_start|>hi<|im_end|>"
    assert not load().has_chat_template
    with pytest.raises(RequestError, match="no chat template: expected chat_template"):
        load().apply_chat([{"role": "user", "content": "hi"}])


@dataclass
class WithEmbedding(FakeCheckpoint):
    """A checkpoint whose vocabulary size only its embedding tells."""

    rows: int = 77

    def tensor(self, name: str) -> SimpleNamespace:
        assert name == "token_embd.weight"
        return SimpleNamespace(shape=(self.rows, 8))


@pytest.mark.parametrize("kind", [{"tokenizer.ggml.model": "none"}, {}])
def test_a_file_without_tokenizer_serves_token_ids_only(kind: dict):
    ends = {"tokenizer.ggml.eos_token_id": np.uint32(3), "tokenizer.ggml.bos_token_id": 1}
    tokenizer = load_tokenizer(WithEmbedding("gguf", metadata={**kind, **ends}))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (77, 1, {3})
    assert not tokenizer.has_text and not tokenizer.has_chat_template
    stream = tokenizer.stream()
    assert [stream.push(5), stream.flush()] == ["", ""]
    for use in (
        lambda: tokenizer.encode("x"),
        lambda: tokenizer.decode([1]),
        lambda: tokenizer.apply_chat([{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(RequestError, match=r"model\.gguf has no tokenizer.*0 to 76"):
            use()


def test_the_vocabulary_size_of_the_architecture_comes_first():
    metadata = {"general.architecture": "mixtral", "mixtral.vocab_size": 12}
    assert load_tokenizer(FakeCheckpoint("gguf", metadata=metadata)).vocab_size == 12


def test_the_byte_alphabet_is_that_of_the_library():
    assert set(BYTE_TO_CHAR.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    for byte, char in BYTE_TO_CHAR.items():
        assert token_bytes(char) == bytes((byte,))
    assert token_bytes("\u0120caf\u00c3\u00a9") == " caf\u00e9".encode()
    assert token_bytes("\u65e5 x") == "\u65e5 x".encode()
