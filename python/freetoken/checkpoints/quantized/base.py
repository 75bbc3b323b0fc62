"""Quantised tensors that a checkpoint keeps in several: codes, scales, a factor.

A scheme finds them by their names and types, and checks all headers; what comes out is one
`ScaledTensor` in place of the several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from freetoken.checkpoints.base import TensorEntry
from freetoken.checkpoints.mapping import MappedFile
from freetoken.checkpoints.tables import StoredTensor
from freetoken.errors import CheckpointError
from freetoken.formats import BF16, F16, F32, WeightFormat
from freetoken.formats.scales import decode_e8m0

Table = Mapping[str, StoredTensor]
Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

FETCH_AGAIN = "fetch the checkpoint again, or convert it anew with a current version of its tool"

_NUMBERS: dict[str, Callable[[Bytes], Float32]] = {
    "F32": F32.dequantize,
    "F16": F16.dequantize,
    "BF16": BF16.dequantize,
    "F8_E8M0": decode_e8m0,
}
FLOAT_TYPES = tuple(_NUMBERS)


@dataclass(frozen=True)
class ScaledTensor:
    """Codes with their scales and, for each matrix or for all of them, a factor.

    `shape` is that of the numbers. With `float_scales` the scales are handed out as float32,
    whatever they are stored as; with `divides` the factor stored is one over the factor meant.
    """

    name: str
    format: WeightFormat
    shape: tuple[int, ...]
    codes: StoredTensor
    scales: StoredTensor | None = None
    float_scales: bool = False
    factor: StoredTensor | None = None
    divides: bool = False

    @property
    def type_name(self) -> str:
        return self.format.name

    @property
    def file(self) -> MappedFile:
        return self.codes.file

    def entry(self) -> TensorEntry:
        """Raises CheckpointError for a factor that is not finite."""
        return TensorEntry(
            name=self.name,
            format=self.format,
            shape=self.shape,
            file=self.file.path,
            data=self.codes.data(),
            scales=None if self.scales is None else self._scales(self.scales),
            factors=None if self.factor is None else self._factors(self.factor),
        )

    def _scales(self, stored: StoredTensor) -> Bytes:
        if not self.float_scales:
            return stored.data()
        return np.ascontiguousarray(numbers(stored)).reshape(-1).view(np.uint8)

    def _factors(self, stored: StoredTensor) -> Float32:
        found = numbers(stored)
        with np.errstate(divide="ignore"):
            factors = np.float32(1) / found if self.divides else found
        if not np.isfinite(factors).all():
            raise CheckpointError(
                "a scale that cannot be used",
                file=stored.file.path,
                tensor=stored.name,
                found=f"{found[~np.isfinite(factors)][0]}",
                expected="a finite number" + (", not zero" if self.divides else ""),
                hint=FETCH_AGAIN,
            )
        leading = self.shape[:-2]
        single = factors.size == 1
        spread = np.broadcast_to(factors.reshape(() if single else leading), leading)
        return np.array(spread, np.float32)


@dataclass(frozen=True)
class Joined:
    """What a scheme found: the tensors, and the names that they stand for or that are idle."""

    tensors: Sequence[ScaledTensor]
    used: frozenset[str]


def replaced(
    stored: Iterable[StoredTensor], joined: Joined
) -> Iterator[StoredTensor | ScaledTensor]:
    """The table of the checkpoint: what is stored as it is, and what was joined."""
    yield from (tensor for tensor in stored if tensor.name not in joined.used)
    yield from joined.tensors


def numbers(stored: StoredTensor) -> Float32:
    """A float tensor as float32 [elements]."""
    return _NUMBERS[stored.type_name](stored.data())


def companion(table: Table, owner: StoredTensor, name: str, meaning: str) -> StoredTensor:
    """The tensor that `owner` cannot be read without. Raises CheckpointError if it is missing."""
    if name not in table:
        raise CheckpointError(
            f"{meaning} of a quantised tensor is missing",
            file=owner.file.path,
            tensor=owner.name,
            found=f"{describe(owner)} without {name}",
            expected=f"a tensor {name}",
            hint=FETCH_AGAIN,
        )
    return table[name]


def check_stored(
    tensor: StoredTensor, types: Sequence[str], shapes: Sequence[tuple[int, ...]], meaning: str
) -> None:
    """Raises CheckpointError unless type and shape are among those."""
    if tensor.type_name in types and tensor.shape in shapes:
        return
    wanted = " or ".join(str(list(shape)) for shape in shapes)
    raise CheckpointError(
        f"{meaning} of a quantised tensor has the wrong type or shape",
        file=tensor.file.path,
        tensor=tensor.name,
        found=describe(tensor),
        expected=f"{' or '.join(types)} {wanted}",
        hint=FETCH_AGAIN,
    )


def check_codes(
    tensor: StoredTensor, types: Sequence[str], dimensions: Sequence[int], last: int | None = None
) -> None:
    """Raises CheckpointError unless the codes have one of the types and numbers of dimensions, all
    sizes positive, and the last of them `last`."""
    good = tensor.type_name in types and len(tensor.shape) in dimensions and all(tensor.shape)
    if good and (last is None or tensor.shape[-1] == last):
        return
    counts = " or ".join(map(str, dimensions))
    raise CheckpointError(
        "codes of a quantised tensor have the wrong type or shape",
        file=tensor.file.path,
        tensor=tensor.name,
        found=describe(tensor),
        expected=f"{' or '.join(types)} of {counts} dimensions"
        + (f", the last of them {last}" if last is not None else ""),
        hint=FETCH_AGAIN,
    )


def check_factor(tensor: StoredTensor, leading: tuple[int, ...], meaning: str) -> None:
    """One float32, or one for each matrix. Raises CheckpointError."""
    shapes: list[tuple[int, ...]] = [(), (1,)]
    if leading:
        shapes += [leading, (*leading, 1), (*leading, 1, 1)]
    check_stored(tensor, ("F32",), shapes, meaning)


def whole_blocks(tensor: StoredTensor, cols: int, block: int) -> int:
    """How many blocks `cols` numbers are. Raises CheckpointError if not a whole number."""
    if cols % block:
        raise CheckpointError(
            "rows of a quantised tensor are no whole number of blocks",
            file=tensor.file.path,
            tensor=tensor.name,
            found=f"{describe(tensor)}, rows of {cols} numbers",
            expected=f"a multiple of {block}",
            hint=FETCH_AGAIN,
        )
    return cols // block


def refuse_leftover(table: Table, joined: Joined, suffixes: Sequence[str], owner: str) -> None:
    """Raises CheckpointError if a tensor with one of the suffixes belongs to no quantised one."""
    for name in table:
        if name.endswith(tuple(suffixes)) and name not in joined.used:
            raise CheckpointError(
                "a scale belongs to no quantised tensor",
                file=table[name].file.path,
                tensor=name,
                found=describe(table[name]),
                expected=f"beside it {owner}",
                hint=FETCH_AGAIN,
            )


def describe(tensor: StoredTensor) -> str:
    return f"{tensor.type_name} {list(tensor.shape)}"
