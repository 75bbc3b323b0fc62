"""How a request wants its tokens chosen, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypeGuard

from freetoken.errors import RequestError, shown

MAX_SEED = 2**64 - 1
_BYTES = (bytes, bytearray, memoryview)


def _require_number(name: str, value: object, allowed: str, accept: bool) -> None:
    if not accept:
        raise RequestError(f"{name} is {shown(value)}; allowed: {allowed}")


def _is_real(value: object) -> TypeGuard[float]:
    """A number that a float can hold."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """Checked when made: RequestError names the parameter and what is allowed.

    temperature: 0 is greedy (ties: the lower id); else logits are divided by it.
    top_p: keep the most probable tokens that together reach this probability; 1 keeps all.
    top_k: keep the k most probable tokens; 0 keeps all, and -1, which becomes 0, does too.
    min_p: keep tokens at least this probable relative to the most probable; 0 keeps all.
    repetition_penalty: above 1, tokens of the prompt and of the output get less likely.
    seed: the same seed gives the same tokens, whatever else is in the batch; None draws one.
    stop: text is cut before the first of these.
    max_tokens: how many tokens to generate at most; None goes on to the context limit.
    ignore_eos: do not stop at the model's end tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    max_tokens: int | None = 256
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        temperature, top_p, top_k, min_p = self.temperature, self.top_p, self.top_k, self.min_p
        penalty, seed, limit = self.repetition_penalty, self.seed, self.max_tokens
        for name, value, allowed, accept in (
            (
                "temperature",
                temperature,
                "a number >= 0",
                _is_real(temperature) and temperature >= 0,
            ),
            ("top_p", top_p, "a number in (0, 1]", _is_real(top_p) and 0 < top_p <= 1),
            ("top_k", top_k, "an integer >= -1 (0 and -1: all)", _is_int(top_k) and top_k >= -1),
            ("min_p", min_p, "a number in [0, 1]", _is_real(min_p) and 0 <= min_p <= 1),
            ("repetition_penalty", penalty, "a number > 0", _is_real(penalty) and penalty > 0),
            (
                "seed",
                seed,
                "None or an integer in [0, 2**64)",
                seed is None or (_is_int(seed) and 0 <= seed <= MAX_SEED),
            ),
            (
                "max_tokens",
                limit,
                "None or an integer >= 0",
                limit is None or (_is_int(limit) and limit >= 0),
            ),
            ("ignore_eos", self.ignore_eos, "True or False", isinstance(self.ignore_eos, bool)),
        ):
            _require_number(name, value, allowed, accept)
        self._normalize_numbers()
        self._normalize_stop()

    def _normalize_numbers(self) -> None:
        """Python's own numbers, whatever kind was given (NumPy's, fractions)."""
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "top_k", max(int(self.top_k), 0))
        for name in ("seed", "max_tokens"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else int(value))

    def _normalize_stop(self) -> None:
        given: object = self.stop
        if not isinstance(given, (Sequence, Set)) or isinstance(given, _BYTES):
            raise RequestError(f"stop is {shown(given)}; allowed: a string, or a list of strings")
        stop = (given,) if isinstance(given, str) else tuple(given)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(
                    f"stop contains {shown(text)}; allowed: strings that are not empty"
                )
        object.__setattr__(self, "stop", stop)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, however it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
