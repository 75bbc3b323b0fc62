"""MXFP4 as gpt-oss has it: `<name>_blocks` [E, N, K/32, 16] and `<name>_scales` [E, N, K/32]."""

from __future__ import annotations

from freetoken.checkpoints.quantized.base import (
    Joined,
    ScaledTensor,
    Table,
    check_codes,
    check_stored,
    companion,
    refuse_leftover,
)
from freetoken.formats import MXFP4_PAIRS

_BLOCKS, _SCALES = "_blocks", "_scales"


def join_mxfp4(table: Table) -> Joined:
    """`<name>_blocks` and `<name>_scales` as `<name>`, [E, N, K] or [N, K]. Raises
    CheckpointError."""
    tensors = []
    used: set[str] = set()
    for name, blocks in table.items():
        if not name.endswith(_BLOCKS):
            continue
        stem = name.removesuffix(_BLOCKS)
        scales = companion(table, blocks, stem + _SCALES, "the tensor of scales")
        check_codes(blocks, ("U8",), (3, 4), MXFP4_PAIRS.codes.bytes)
        check_stored(scales, ("U8", "F8_E8M0"), (blocks.shape[:-1],), "the tensor of scales")
        shape = (*blocks.shape[:-2], blocks.shape[-2] * MXFP4_PAIRS.block_elements)
        tensors.append(ScaledTensor(stem, MXFP4_PAIRS, shape, blocks, scales))
        used |= {name, scales.name}
    joined = Joined(tensors, frozenset(used))
    refuse_leftover(table, joined, (_SCALES,), "a tensor of the same name with _blocks at its end")
    return joined
