"""FP8 in blocks of 128 x 128, and DeepSeek's FP4 experts, both of quant_method "fp8".

A matrix `<stem>weight` has its scales in `<stem>weight_scale_inv` (despite the name they
multiply), a stack of experts `<name>` in `<name>_scale_inv`, and DeepSeek's own files have them in
`<stem>scale`. e4m3 codes [N, K] have a float scale for each 128 x 128 numbers; int8 codes
[N, K/2] are pairs of FP4 numbers with an e8m0 scale for each 32 of a row.
"""

from __future__ import annotations

from freetoken.checkpoints.quantized.base import (
    FLOAT_TYPES,
    Joined,
    ScaledTensor,
    Table,
    check_codes,
    check_stored,
    companion,
    refuse_leftover,
    whole_blocks,
)
from freetoken.checkpoints.tables import StoredTensor
from freetoken.formats import DS_FP4, FP8_128

_SUFFIX = "_scale_inv"
_IGNORED = ("activation_scale", ".input_scale", ".k_scale", ".v_scale", ".q_scale")
_MEANING = "the tensor of scales"


def join_fp8(table: Table) -> Joined:
    """Every tensor of type F8_E4M3 or I8 with its scales, under its own name. Raises
    CheckpointError."""
    tensors = []
    used = {name for name in table if name.endswith(_IGNORED)}
    for name, codes in table.items():
        if codes.type_name not in ("F8_E4M3", "I8"):
            continue
        own = name.removesuffix("weight") + "scale"
        scale_name = own if own in table and own != name + "scale" else name + _SUFFIX
        scales = companion(table, codes, scale_name, _MEANING)
        join = _fp8 if codes.type_name == "F8_E4M3" else _fp4
        tensors.append(join(codes, scales))
        used |= {name, scales.name}
    joined = Joined(tensors, frozenset(used))
    refuse_leftover(table, joined, (_SUFFIX,), "a tensor of that name, F8_E4M3 or I8")
    return joined


def _fp8(codes: StoredTensor, scales: StoredTensor) -> ScaledTensor:
    check_codes(codes, ("F8_E4M3",), (2, 3))
    *leading, rows, cols = codes.shape
    scale_rows, scale_bytes = FP8_128.scale_plane(rows, cols)
    wanted = (*leading, scale_rows, scale_bytes // FP8_128.scales.bytes)
    check_stored(scales, FLOAT_TYPES, (wanted,), _MEANING)
    return ScaledTensor(codes.name, FP8_128, codes.shape, codes, scales, float_scales=True)


def _fp4(codes: StoredTensor, scales: StoredTensor) -> ScaledTensor:
    check_codes(codes, ("I8",), (2, 3))
    *leading, rows, half = codes.shape
    blocks = whole_blocks(codes, 2 * half, DS_FP4.block_elements)
    check_stored(scales, ("F8_E8M0", "U8"), ((*leading, rows, blocks),), _MEANING)
    return ScaledTensor(codes.name, DS_FP4, (*leading, rows, 2 * half), codes, scales)
