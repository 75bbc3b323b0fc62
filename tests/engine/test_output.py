"""Text that is safe to show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.engine.output import TextAssembler


class Pieces:
    """Token i is the i-th piece; `tail` comes with the flush."""

    def __init__(self, pieces: list[str], tail: str = "") -> None:
        self._pieces = pieces
        self._tail = tail

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return self._tail


def run(pieces: list[str], stop: tuple[str, ...], tail: str = "") -> tuple[list[str], bool]:
    assembler = TextAssembler(Pieces(pieces, tail), stop)
    released = []
    for token in range(len(pieces)):
        released.append(assembler.push(token))
        if assembler.stopped:
            return released, True
    released.append(assembler.finish())
    return released, assembler.stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "released", "stopped"),
    [
        (["ab", "cd"], (), ["ab", "cd", ""], False),
        (["ab", "STOP", "x"], ("STOP",), ["ab", ""], True),
        (["a S", "TO", "P b"], ("STOP",), ["a ", "", ""], True),
        (["a S", "TO", "X"], ("STOP",), ["a ", "", "STOX", ""], False),
        (["a S", "T"], ("STOP",), ["a ", "", "ST"], False),
        (["aa", "ab"], ("aab",), ["", "a"], True),
        (["aa", "aab"], ("aab",), ["", "aa"], True),
        (["one two"], ("two", "one"), [""], True),
        (["x\n", "\ny"], ("\n\n",), ["x", ""], True),
        (["aSTO", "a"], ("STOP", "TOa"), ["a", "S"], True),
    ],
)
def test_stop_strings(
    pieces: list[str], stop: tuple[str, ...], released: list[str], stopped: bool
) -> None:
    assert run(pieces, stop) == (released, stopped)


def test_a_stop_string_may_end_in_the_flushed_tail() -> None:
    assert run(["a", "ST"], ("STOP",), tail="OP!") == (["a", "", ""], True)


@given(
    st.lists(st.text("ab", max_size=3), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.text("ab", max_size=2),
)
def test_text_is_everything_before_the_first_stop(
    pieces: list[str], stop: list[str], tail: str
) -> None:
    released, stopped = run(pieces, tuple(stop), tail)
    whole = "".join(pieces) + tail
    text = "".join(released)
    assert whole.startswith(text)
    assert not any(s in text for s in stop)
    if stopped:
        assert any(whole.startswith(s, len(text)) for s in stop)
    else:
        assert text == whole


@given(st.lists(st.text("ab", max_size=3), max_size=8), st.text("ab", min_size=1, max_size=4))
def test_exactly_what_may_begin_a_stop_string_is_held_back(pieces: list[str], stop: str) -> None:
    assembler = TextAssembler(Pieces(pieces), (stop,))
    shown = whole = ""
    for token in range(len(pieces)):
        shown += assembler.push(token)
        whole += pieces[token]
        if assembler.stopped:
            return
        held = max(n for n in range(len(stop)) if whole.endswith(stop[:n]))
        assert shown == whole[: len(whole) - held]
