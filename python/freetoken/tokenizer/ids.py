"""What counts as a list of token ids, wherever a caller hands one over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import SupportsIndex, TypeGuard

import numpy as np
import torch
from torch import Tensor

from freetoken.errors import RequestError, shown

BYTES = (bytes, bytearray, memoryview)
# They can be iterated over, but are no list: bytes are undecoded text, the others have keys, or no
# order.
NO_LISTS = (str, *BYTES, Mapping, Set)


def read_ids(found: Iterable[int], role: str, text_hint: str = "") -> Iterator[int]:
    """Python's integers from an iterable of whole numbers of any kind, NumPy's and torch's among
    them. All else is a RequestError that begins with `role`, what the ids are for and ought to be;
    it ends with `text_hint` where a text was found."""
    for index, token in enumerate(iterate(found, role, text_hint)):
        if not is_token(token):
            raise no_ids(token, role, text_hint, f" as its item {index}")
        try:
            yield token.__index__()
        except Exception as error:  # of a class of the caller, of a tensor without data
            raise RequestError(
                f"{role}; item {index}, {shown(token)}, cannot be read: {error}"
            ) from error


def is_token(item: object) -> TypeGuard[SupportsIndex]:
    """A whole number, Python's, NumPy's or torch's. An array or tensor of one element has an
    `__index__` too, but it is a list of one token; a truth value is no number here."""
    if isinstance(item, Tensor):
        return item.ndim == 0 and not item.is_floating_point() and item.dtype != torch.bool
    if isinstance(item, np.ndarray):
        return item.ndim == 0 and np.issubdtype(item.dtype, np.integer)
    return isinstance(item, SupportsIndex) and not isinstance(item, (bool, np.bool_))


def iterate(found: Iterable[object], role: str, text_hint: str = "") -> Iterator[object]:
    """The items of a list, whatever they are; RequestError for what is none."""
    if isinstance(found, NO_LISTS):
        raise no_ids(found, role, text_hint)
    try:
        return iter(found)
    except TypeError as error:  # of a number, and of tensors without a dimension
        raise no_ids(found, role, text_hint) from error


def no_ids(found: object, role: str, text_hint: str, where: str = "") -> RequestError:
    hint = text_hint if isinstance(found, str) else bytes_hint(found)
    return RequestError(f"{role}; found {shown(found)}{where}{hint}")


def bytes_hint(found: object) -> str:
    """What an error adds where bytes were found instead of a text."""
    return "; bytes are decoded first: str(..., 'utf-8')" if isinstance(found, BYTES) else ""
