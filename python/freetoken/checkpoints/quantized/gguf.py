"""Factors of NVFP4 tensors in GGUF files: `<stem>scale` beside `<stem>weight`.

The blocks carry their own scales; what ModelOpt keeps as weight_scale_2 becomes a small tensor
with one number, or one for each expert. Scales of activations (`<stem>input_scale`) are idle here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from freetoken.checkpoints.quantized.base import (
    Joined,
    ScaledTensor,
    check_factor,
    replaced,
)
from freetoken.checkpoints.tables import StoredTensor
from freetoken.formats import NVFP4


def join_factors(stored: Sequence[StoredTensor]) -> Iterator[StoredTensor | ScaledTensor]:
    """The table of a GGUF file. Raises CheckpointError for a factor of the wrong shape."""
    table = {tensor.name: tensor for tensor in stored}
    tensors = []
    used: set[str] = set()
    for tensor in stored:
        stem = tensor.name.removesuffix("weight")
        if tensor.type_name != NVFP4.name or stem == tensor.name:
            continue
        if stem + "input_scale" in table:
            used.add(stem + "input_scale")
        factor = table.get(stem + "scale")
        if factor is None:
            continue
        check_factor(factor, tensor.shape[:-2], "the scale of the whole tensor")
        tensors.append(ScaledTensor(tensor.name, NVFP4, tensor.shape, tensor, factor=factor))
        used |= {tensor.name, factor.name}
    return replaced(stored, Joined(tensors, frozenset(used)))
