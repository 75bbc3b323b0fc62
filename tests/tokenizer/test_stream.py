"""Incremental decoding: never half a character, never another text than `decode`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.errors import RequestError
from freetoken.tokenizer.stream import IncrementalDecoder, Vocabulary

BYTES = Vocabulary([bytes((value,)) for value in range(256)], frozenset(), False)
WORDS = Vocabulary([b"<s>", b" a", b" b", b" ", b"", b"c"], frozenset({0}), True)


def pieces(vocabulary: Vocabulary, ids: list[int], **options: bool) -> list[str]:
    chosen = {"skip_special": True, "continuation": False, **options}
    decoder = IncrementalDecoder(vocabulary, **chosen)
    return [*map(decoder.push, ids), decoder.flush()]


def test_a_character_comes_out_with_its_last_byte():
    assert pieces(BYTES, list("é😀".encode())) == ["", "é", "", "", "", "😀", ""]


def test_flush_turns_an_unfinished_character_into_a_replacement():
    assert pieces(BYTES, [0x41, 0xF0, 0x9F]) == ["A", "", "", "\ufffd"]


def test_wrong_bytes_do_not_hold_back_what_follows():
    assert pieces(BYTES, [0xFF, 0xE2, 0x41, 0x42]) == ["\ufffd", "", "\ufffdA", "B", ""]


@given(st.binary(max_size=40))
def test_pieces_joined_are_the_bytes_decoded_at_once(data: bytes):
    assert "".join(pieces(BYTES, list(data))) == data.decode("utf-8", errors="replace")


@given(st.text(max_size=20))
def test_no_piece_of_valid_text_has_a_replacement_character(text: str):
    text = text.replace("\ufffd", "")
    assert "\ufffd" not in "".join(pieces(BYTES, list(text.encode())))


def test_only_one_space_of_the_first_word_is_dropped():
    assert pieces(WORDS, [1, 2]) == ["a", " b", ""]
    assert pieces(WORDS, [3, 1]) == ["", " a", ""]
    assert pieces(WORDS, [5, 1]) == ["c", " a", ""]


def test_skipped_and_empty_tokens_are_not_the_first_word():
    assert pieces(WORDS, [0, 4, 1, 0, 2]) == ["", "", "a", "", " b", ""]


def test_a_shown_special_token_is_the_first_word():
    assert pieces(WORDS, [0, 1], skip_special=False) == ["<s>", " a", ""]


def test_a_continuation_keeps_its_space():
    assert pieces(WORDS, [1, 2], continuation=True) == [" a", " b", ""]


def test_ids_above_the_vocabulary_are_padding_rows_without_text():
    assert pieces(WORDS, [5, 6, 10**9, 5]) == ["c", "", "", "c", ""]


def test_negative_ids_are_refused():
    with pytest.raises(RequestError, match="token id -1 is negative: expected 0 to 5"):
        pieces(WORDS, [-1])
