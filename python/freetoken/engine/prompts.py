"""What a caller hands over, checked before anything runs: prompts and their parameters.

Every wrong value is a RequestError that says what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import SupportsIndex, TypeGuard, cast

import numpy as np
from torch import Tensor

from freetoken.errors import RequestError, shown
from freetoken.scheduler.params import SamplingParams

Prompt = str | Sequence[int]

# They can be iterated over, but are no list of token ids: bytes are undecoded text, and the others
# have keys, or no order.
_NO_LISTS = (bytes, bytearray, memoryview, Mapping, Set)
_MAKE_PARAMS = "make it with SamplingParams(temperature=..., max_tokens=...)"


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The first element decides: a whole number begins one prompt, all else a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(_iterate(prompts))
    if items and _is_token(items[0]):
        return [cast("list[int]", items)]
    return cast("list[Prompt]", items)


def as_ids(token_ids: Iterable[int]) -> list[int]:
    """Ids from any iterable of whole numbers, NumPy's and torch's among them."""
    ids = []
    for index, token in enumerate(_iterate(token_ids)):
        if not _is_token(token):
            raise _not_a_prompt(token, f" as its item {index}")
        ids.append(_index(token))
    return ids


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
    if isinstance(params, (str, *_NO_LISTS)) or not isinstance(params, Sequence):
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


def _is_token(item: object) -> TypeGuard[SupportsIndex]:
    """A whole number, Python's, NumPy's or torch's. An array or tensor of one element has an
    `__index__` too, but it is a prompt of one token; a truth value is no number here."""
    if isinstance(item, Tensor):
        return item.ndim == 0 and not item.is_floating_point() and str(item.dtype) != "torch.bool"
    if isinstance(item, np.ndarray):
        return item.ndim == 0 and np.issubdtype(item.dtype, np.integer)
    return isinstance(item, SupportsIndex) and not isinstance(item, (bool, np.bool_))


def _index(token: SupportsIndex) -> int:
    try:
        return token.__index__()
    except Exception as error:  # of a class of the caller, of a tensor without data
        raise RequestError(
            f"a token id of a prompt cannot be read: {error}; found {shown(token)}, expected a "
            "whole number"
        ) from error


def _iterate(found: Iterable[object]) -> Iterator[object]:
    if isinstance(found, (str, *_NO_LISTS)):
        raise _not_a_prompt(found)
    try:
        return iter(found)
    except TypeError as error:  # of a number, and of tensors without a dimension
        raise _not_a_prompt(found) from error


def _not_a_prompt(found: object, where: str = "") -> RequestError:
    hint = ""
    if isinstance(found, str):
        hint = "; give texts in a list of their own, or make ids of them with tokenizer.encode"
    elif isinstance(found, (bytes, bytearray)):
        hint = "; bytes are decoded first: .decode('utf-8')"
    return RequestError(
        "a prompt is a text or a list of token ids (whole numbers); found "
        f"{shown(found)}{where}{hint}"
    )
