"""NVFP4 as ModelOpt and compressed-tensors have it.

Both keep codes [N, K/2], e4m3 scales [N, K/16] and one float32 for the whole matrix, which
multiplies in ModelOpt's files and divides in compressed-tensors'.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.checkpoints.quantized.base import (
    Joined,
    ScaledTensor,
    Table,
    check_codes,
    check_factor,
    check_stored,
    companion,
    refuse_leftover,
    whole_blocks,
)
from freetoken.formats import NVFP4_PAIRS


@dataclass(frozen=True)
class Nvfp4Layout:
    """Names after the stem ("...q_proj."), and what to pass over: scales of activations and of
    key-value caches, which are float32 here."""

    codes: str
    scales: str
    factor: str
    divides: bool
    ignored: tuple[str, ...]


MODELOPT = Nvfp4Layout(
    "weight",
    "weight_scale",
    "weight_scale_2",
    divides=False,
    ignored=(".input_scale", ".k_scale", ".v_scale", ".q_scale"),
)
COMPRESSED_TENSORS = Nvfp4Layout(
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    divides=True,
    ignored=(".input_global_scale", ".input_scale", ".k_scale", ".v_scale", ".q_scale"),
)


def join_nvfp4(table: Table, layout: Nvfp4Layout) -> Joined:
    """Codes, scales and factor as `<stem>weight` [N, K] (or [E, N, K]). Raises CheckpointError."""
    tensors = []
    used = {name for name in table if name.endswith(layout.ignored)}
    for name, codes in table.items():
        stem = name.removesuffix(layout.codes)
        if not name.endswith("." + layout.codes):
            continue
        if layout is MODELOPT and codes.type_name != "U8":
            continue  # not quantised; a scale beside it is refused below
        scales = companion(table, codes, stem + layout.scales, "the tensor of scales")
        factor = companion(table, codes, stem + layout.factor, "the scale of the whole tensor")
        check_codes(codes, ("U8",), (2, 3))
        *leading, rows, half = codes.shape
        shape = (*leading, rows, 2 * half)
        blocks = whole_blocks(codes, 2 * half, NVFP4_PAIRS.block_elements)
        check_stored(scales, ("F8_E4M3",), ((*leading, rows, blocks),), "the tensor of scales")
        check_factor(factor, tuple(leading), "the scale of the whole tensor")
        tensors.append(
            ScaledTensor(
                stem + "weight",
                NVFP4_PAIRS,
                shape,
                codes,
                scales,
                factor=factor,
                divides=layout.divides,
            )
        )
        used |= {name, scales.name, factor.name}
    joined = Joined(tensors, frozenset(used))
    suffixes = ("." + layout.scales, "." + layout.factor)
    refuse_leftover(table, joined, suffixes, f"packed codes, U8, that end in {layout.codes}")
    return joined
