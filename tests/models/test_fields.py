"""Typed reading of metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetoken.errors import CheckpointError
from freetoken.models.fields import Fields


def fields(**values: Any) -> Fields:
    return Fields(values, Path("config.json"), "model.")


def test_values_of_every_kind() -> None:
    read = fields(
        n=3, x=0.5, on=True, s="t", null=None, many=[4, 4], a=np.uint32(7), o={"k": 2}, l=[1, 2]
    )
    assert read.integer("n") == 3 and read.integer("a") == 7 and read.integer("many") == 4
    assert read.integer("null", 9) == 9 and read.integer("gone", 9) == 9
    assert read.optional_integer("null") is None and read.optional_integer("n") == 3
    assert read.number("x") == 0.5 and read.number("n") == 3.0
    assert read.flag("on", False) and not read.flag("gone", False)
    assert read.text("s") == "t" and read.text("gone", "u") == "u"
    assert read.inside("o").integer("k") == 2 and read.array("l") == [1, 2]
    assert read.has("n") and not read.has("null") and not read.has("gone")
    read.require("n", (3, 4), "hint")
    read.require("gone", (3, 4), "hint")


@pytest.mark.parametrize(
    ("value", "reader", "expected"),
    [
        ("3", "integer", "an integer of at least 1"),
        (3.0, "integer", "an integer of at least 1"),
        (True, "integer", "an integer of at least 1"),
        (0, "integer", "an integer of at least 1"),
        ([1, 2], "integer", "an integer of at least 1"),
        ([], "integer", "an integer of at least 1"),
        (None, "integer", "a value"),
        (float("nan"), "number", "a finite number"),
        ("1", "number", "a finite number"),
        (-1.0, "number", "above zero"),
        (3, "text", "a string"),
        ("x", "array", "an array"),
        ([1], "inside", "an object"),
    ],
)
def test_wrong_values_name_key_found_and_expected(value: Any, reader: str, expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        getattr(fields(key=value), reader)("key")
    message = str(caught.value)
    assert "config.json" in message and "'model.key'" in message
    assert repr(value) in message and expected in message


def test_an_absent_key_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"'model\.gone'") as caught:
        fields().integer("gone")
    assert "no such key" in str(caught.value)


def test_require_says_what_is_allowed() -> None:
    with pytest.raises(CheckpointError, match="'silu' or 'swish'") as caught:
        fields(act="gelu").require("act", ("silu", "swish"), "only SiLU")
    assert "what to do: only SiLU" in str(caught.value)
