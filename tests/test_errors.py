"""Values as messages show them."""

from __future__ import annotations

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
    assert 0 < len(shown(value)) < 300
    assert type(value).__name__ in shown(value)


def test_of_a_long_list_few_items_are_looked_at() -> None:
    looked = 0

    class Item:
        def __repr__(self) -> str:
            nonlocal looked
            looked += 1
            return "item"

    many = [Item()] * 10**5
    for value in (many, tuple(many), dict(enumerate(many)), [many] * 10):
        shown(value)
    assert 0 < looked < 500


def test_a_list_that_holds_itself_can_be_shown() -> None:
    value: list[object] = []
    value.append(value)
    assert shown(value).endswith("(list)")
