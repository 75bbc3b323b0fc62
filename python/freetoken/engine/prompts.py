"""What a caller hands over, checked before anything runs: prompts and their parameters.

Every wrong value is a RequestError that says what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from freetoken.errors import RequestError, shown
from freetoken.scheduler.params import SamplingParams
from freetoken.tokenizer.ids import NO_LISTS, is_token, iterate, read_ids

Prompt = str | Sequence[int]

_A_PROMPT = "a prompt is a text or a list of token ids (whole numbers)"
_TEXT_HINT = "; give texts in a list of their own, or make ids of them with tokenizer.encode"
_MAKE_PARAMS = "make it with SamplingParams(temperature=..., max_tokens=...)"


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The first element decides: a whole number begins one prompt, all else a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(iterate(prompts, _A_PROMPT, _TEXT_HINT))
    if items and is_token(items[0]):
        return [cast("list[int]", items)]
    return cast("list[Prompt]", items)


def as_ids(token_ids: Iterable[int]) -> list[int]:
    """Ids from any iterable of whole numbers, NumPy's and torch's among them."""
    return list(read_ids(token_ids, _A_PROMPT, _TEXT_HINT))


def one_params(params: SamplingParams | None) -> SamplingParams:
    """Parameters of one prompt; None: the defaults."""
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    raise RequestError(
        f"the sampling parameters are {shown(params)}; expected a SamplingParams; {_MAKE_PARAMS}"
    )


def params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: int
) -> list[SamplingParams]:
    """One for all, or one per prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [one_params(params)] * prompts
    if isinstance(params, NO_LISTS) or not isinstance(params, Sequence):
        raise RequestError(
            f"the sampling parameters are {shown(params)}; expected a SamplingParams, or a list "
            f"with one per prompt; {_MAKE_PARAMS}"
        )
    for index, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise RequestError(
                f"entry {index} of the sampling parameters is {shown(one)}; expected a "
                f"SamplingParams; {_MAKE_PARAMS}"
            )
    if len(params) != prompts:
        raise RequestError(
            f"{len(params)} SamplingParams for {prompts} prompts; give one, or one per prompt"
        )
    return list(params)
