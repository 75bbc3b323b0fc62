"""Sampling parameters are checked when made."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from freetoken.errors import RequestError
from freetoken.scheduler import SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.1, "a number >= 0"),
        ("temperature", math.nan, "a number >= 0"),
        ("temperature", math.inf, "a number >= 0"),
        ("temperature", "1", "a number >= 0"),
        ("top_p", 0.0, "in (0, 1]"),
        ("top_p", 1.01, "in (0, 1]"),
        ("top_k", -2, "an integer >= -1"),
        ("top_k", 1.5, "an integer >= -1"),
        ("min_p", -0.01, "in [0, 1]"),
        ("min_p", 1.5, "in [0, 1]"),
        ("repetition_penalty", 0, "a number > 0"),
        ("seed", -1, "[0, 2**64)"),
        ("seed", 2**64, "[0, 2**64)"),
        ("max_tokens", -1, "an integer >= 0"),
        ("max_tokens", True, "an integer >= 0"),
        ("ignore_eos", 1, "True or False"),
        ("stop", ("",), "not empty"),
        ("stop", (1,), "not empty"),
        ("stop", None, "a string, or a list of strings"),
        ("stop", 5, "a string, or a list of strings"),
        ("stop", b"x", "a string, or a list of strings"),
        ("stop", {"x": 1}, "a string, or a list of strings"),
        ("temperature", 10**400, "a number >= 0"),
        pytest.param("temperature", 10**5000, "a number >= 0", id="too long to print"),
        ("temperature", 1 + 1j, "a number >= 0"),
        ("top_p", -(10**400), "in (0, 1]"),
        ("min_p", 10**400, "in [0, 1]"),
        ("repetition_penalty", 10**400, "a number > 0"),
        ("seed", 2**70, "[0, 2**64)"),
        ("seed", 1.0, "[0, 2**64)"),
        ("max_tokens", 1.5, "an integer >= 0"),
        ("max_tokens", np.array([1, 2]), "an integer >= 0"),
        ("top_k", {}, "an integer >= -1"),
    ],
)
def test_bad_values_name_parameter_value_and_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert name in message and allowed in message and len(message) < 400
    assert type(value[0] if name == "stop" and type(value) is tuple else value).__name__ in message


def test_numbers_of_any_kind_become_pythons_own() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_p=Fraction(1, 3), top_k=np.int64(3), seed=np.uint64(9)
    )
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 1 / 3, 3, 9)
    numbers = (params.temperature, params.top_p, params.top_k, params.seed, params.max_tokens)
    assert [type(number) for number in numbers] == [float, float, int, int, int]


def test_limits_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=0, min_p=1, seed=2**64 - 1, max_tokens=0)
    SamplingParams(seed=None, max_tokens=None, repetition_penalty=0.5)


@pytest.mark.parametrize("everything", [0, -1])
def test_two_values_of_top_k_keep_all(everything: int) -> None:
    assert SamplingParams(top_k=everything) == SamplingParams()


def test_stop_takes_one_text_or_several() -> None:
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop=["x", "yz"]).stop_strings == ("x", "yz")
    assert SamplingParams().stop_strings == ()


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 2  # type: ignore[misc]
