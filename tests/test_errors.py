"""Values as messages show them."""

from __future__ import annotations

import time

import pytest

from freetoken.errors import shown


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


_TOO_LONG = 10**5000  # Python refuses to print it


def repr_free(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5 (int)"),
        ("a", "'a' (str)"),
        (None, "None (NoneType)"),
        ([1, "a"], "[1, 'a'] (list)"),
        ("\ud800", "'\\ud800' (str)"),
    ],
)
def test_a_value_is_shown_with_its_type(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    "value",
    [Unprintable(), [10**5000], "x" * 10**7, [[[[1] * 1000] * 1000] * 1000], _TOO_LONG],
    ids=repr_free,
)
def test_any_value_can_be_shown_in_short(value: object) -> None:
    started = time.perf_counter()
    assert 0 < len(shown(value)) < 300
    assert type(value).__name__ in shown(value)
    assert time.perf_counter() - started < 0.5


def test_a_list_that_holds_itself_can_be_shown() -> None:
    value: list[object] = []
    value.append(value)
    assert shown(value).endswith("(list)")
