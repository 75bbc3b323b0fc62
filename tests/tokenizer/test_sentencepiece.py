"""The score merge against SentencePiece itself, from GGUF metadata and from tokenizer.model."""

from __future__ import annotations

from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.errors import CheckpointError, RequestError
from freetoken.tokenizer import Tokenizer, load_tokenizer
from freetoken.tokenizer.sentencepiece import (
    Pieces,
    ScoreMergeEncoder,
    SpecialText,
    merge_by_score,
)
from support.tokenizer_files import (
    SPM_USER_DEFINED,
    TEXTS,
    FakeCheckpoint,
    sentencepiece_metadata,
    trained_sentencepiece,
    write_files,
)

VARIANTS = [
    {},
    {"byte_fallback": False},
    {"rule": "nmt_nfkc", "tidy": True},
    {"tidy": True},
]


def processor_of(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def from_gguf(model: bytes, **changes: object) -> Tokenizer:
    return load_tokenizer(FakeCheckpoint("gguf", metadata=sentencepiece_metadata(model, **changes)))


def from_directory(directory: Path, model: bytes, config: dict[str, object]) -> Tokenizer:
    write_files(directory, [("tokenizer.model", model), ("tokenizer_config.json", config)])
    return load_tokenizer(FakeCheckpoint("safetensors", path=directory, metadata={}))


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_ids_are_those_of_sentencepiece(text: str):
    model = trained_sentencepiece()
    tokenizer, reference = from_gguf(model), processor_of(model)
    assert tokenizer.encode(text, add_special=False) == reference.encode(text)
    assert tokenizer.encode(text) == [reference.bos_id(), *reference.encode(text)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_directory_ids_are_those_of_sentencepiece(variant: dict, tmp_path: Path):
    model = trained_sentencepiece(**variant)
    tokenizer, reference = from_directory(tmp_path, model, {}), processor_of(model)
    for text in TEXTS:
        # SentencePiece keeps NUL out of its C strings' way by its own rules.
        text = text.replace("\x00", "")
        assert tokenizer.encode(text, add_special=False) == reference.encode(text), repr(text)


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("aabbcdehlo  \u2581tThe.,\n1é日😀"), max_size=60))
def test_any_text_gives_the_ids_of_sentencepiece(text: str):
    model = trained_sentencepiece()
    assert from_gguf_cached().encode(text, add_special=False) == processor_of(model).encode(text)


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]), max_size=40))
def test_byte_fallback_loses_nothing(text: str):
    tokenizer = from_gguf_cached()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join([*map(stream.push, ids), stream.flush()]) == text


_CACHED: list[Tokenizer] = []


def from_gguf_cached() -> Tokenizer:
    if not _CACHED:
        _CACHED.append(from_gguf(trained_sentencepiece()))
    return _CACHED[0]


def test_special_tokens_in_the_text_become_their_ids():
    tokenizer = from_gguf_cached()
    bos, eos = tokenizer.bos_id, max(tokenizer.eos_ids)
    word = tokenizer.encode("dog", add_special=False)
    assert tokenizer.encode("<s>dog</s>dog", add_special=False) == [bos, *word, eos, *word]
    assert tokenizer.decode([bos, *word, eos]) == "dog"
    assert tokenizer.decode([bos, *word, eos], skip_special=False) == "<s> dog</s>"


def test_a_file_can_say_that_no_space_is_added_before_text():
    tokenizer = from_gguf(trained_sentencepiece(), add_space_prefix=False)
    assert tokenizer.encode("dog") != from_gguf_cached().encode("dog")
    assert tokenizer.encode(" dog") == from_gguf_cached().encode("dog")
    assert tokenizer.decode(tokenizer.encode(" dog")) == " dog"


def test_flags_choose_what_is_added_around_a_text():
    tokenizer = from_gguf(trained_sentencepiece(), add_bos_token=False, add_eos_token=True)
    assert tokenizer.encode("")[-1] in tokenizer.eos_ids
    assert tokenizer.bos_id not in tokenizer.encode("dog")


def test_user_defined_pieces_do_not_restart_the_text_of_a_directory(tmp_path: Path):
    model = trained_sentencepiece()
    text = f"dog{SPM_USER_DEFINED[0]}dog {SPM_USER_DEFINED[1]}"
    ids = from_directory(tmp_path, model, {}).encode(text, add_special=False)
    assert ids == processor_of(model).encode(text)


def test_added_tokens_of_the_config_follow_the_model(tmp_path: Path):
    model = trained_sentencepiece()
    size = processor_of(model).get_piece_size()
    added = {str(size): {"content": "<|end|>", "special": True}}
    tokenizer = from_directory(tmp_path, model, {"added_tokens_decoder": added, "legacy": False})
    assert tokenizer.vocab_size == size + 1
    ids = tokenizer.encode("dog<|end|>dog", add_special=False)
    dog = processor_of(model).encode("dog")
    assert ids[: len(dog) + 1] == [*dog, size]
    assert ids[len(dog) + 1 :] != dog  # no space is put after a special token: not "legacy"
    assert tokenizer.decode(ids) == "dogdog"


def test_equal_pieces_merge_from_the_left():
    scores = {"aa": -1.0, "aaa": -2.0, "aaaa": -3.0}
    assert merge_by_score("aaaaaaa", scores) == ["aaaa", "aaa"]
    assert merge_by_score("aaa", scores) == ["aaa"]
    assert merge_by_score("", scores) == []


@given(st.text(st.sampled_from("ab "), max_size=30), st.integers(0, 10**6))
def test_cutting_at_words_does_not_change_the_merge(text: str, seed: int):
    texts = ["a", "b", "\u2581", "ab", "\u2581a", "\u2581\u2581", "aa", "\u2581ab", "bb", "aab"]
    scores = {piece: float((seed * 7919 + i * 104729) % 13) for i, piece in enumerate(texts)}
    ids = {piece: i for i, piece in enumerate(texts)}
    encoder = ScoreMergeEncoder(Pieces(ids, scores, (), 99), {}, "never")
    whole = [ids[piece] for piece in merge_by_score(text.replace(" ", "\u2581"), scores)]
    assert encoder.encode(text) == whole


def test_pieces_with_inner_spaces_are_merged_across_words():
    texts = ["a", "b", "\u2581", "a\u2581", "a\u2581b"]
    ids = {piece: i for i, piece in enumerate(texts)}
    scores = dict.fromkeys(texts, 0.0)
    encoder = ScoreMergeEncoder(Pieces(ids, scores, (), None), {}, "never")
    assert encoder.encode("a b") == [4]


def test_of_specials_that_overlap_the_longest_is_found():
    specials = {"<a>": SpecialText(0, True), "<a><b>": SpecialText(1, True)}
    encoder = ScoreMergeEncoder(Pieces({}, {}, (), 2), specials, "never")
    assert encoder.encode("<a><b><a>") == [1, 0]


def test_a_vocabulary_without_any_way_out_refuses_the_character():
    encoder = ScoreMergeEncoder(Pieces({"a": 0}, {"a": 0.0}, (), None), {}, "never")
    assert encoder.encode("aa") == [0, 0]
    with pytest.raises(RequestError, match="no token for 'b'"):
        encoder.encode("ab")


def test_unigram_models_are_refused_with_the_way_out(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"UNIGRAM[\s\S]*expected: BPE[\s\S]*save_pretrained"):
        from_directory(tmp_path, trained_sentencepiece(kind="unigram"), {})


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_damaged_models_are_refused(size: int, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: .*[\s\S]*what to do"):
        from_directory(tmp_path, trained_sentencepiece()[:size], {})


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_arbitrary_bytes_give_an_error_or_a_model(tmp_path_factory: pytest.TempPathFactory, data):
    path = tmp_path_factory.mktemp("spm")
    try:
        from_directory(path, data, {})
    except CheckpointError as error:
        assert "tokenizer.model" in str(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, r"scores is missing or no array"),
        ({"scores": [0.0]}, r"scores has another length[\s\S]*found:    1 entries"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"token_type": [1, 2]}, r"token_type has another length[\s\S]*found:    2 entries"),
        ({"eos_token_id": 10**6}, r"eos_token_id is outside the vocabulary[\s\S]*1000000"),
    ],
)
def test_contradicting_metadata_are_refused(changes: dict, message: str):
    with pytest.raises(CheckpointError, match=message):
        from_gguf(trained_sentencepiece(), **changes)
