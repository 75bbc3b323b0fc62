"""How a request wants its tokens chosen, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from freetoken.errors import RequestError

MAX_SEED = 2**64 - 1


def _require_number(name: str, value: object, allowed: str, accept: bool) -> None:
    if not accept:
        raise RequestError(f"{name} is {value!r}; allowed: {allowed}")


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: object) -> bool:
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
        object.__setattr__(self, "top_k", max(top_k, 0))
        self._normalize_stop()

    def _normalize_stop(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop contains {text!r}; allowed: strings that are not empty")
        object.__setattr__(self, "stop", stop)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, however it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
