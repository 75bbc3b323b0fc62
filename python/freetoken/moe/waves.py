"""Dividing a call that needs more experts than there are slots. No tensors here."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt


def split_tokens(topk_ids: npt.NDArray[np.int32], slots: int) -> list[slice]:
    """Runs of tokens of ids [T, K] that need at most `slots` distinct experts each.

    Each token's own experts must fit. Padded entries (-1) need none.
    """
    if topk_ids.size <= slots:
        return [slice(0, len(topk_ids))]
    runs: list[slice] = []
    begin, needed = 0, set[int]()
    for token, ids in enumerate(topk_ids.tolist()):
        own = {expert for expert in ids if expert >= 0}
        if len(needed | own) > slots:
            runs.append(slice(begin, token))
            begin, needed = token, set[int]()
        needed |= own
    runs.append(slice(begin, len(topk_ids)))
    return runs


def split_experts(
    topk_ids: npt.NDArray[np.int32], slots: int, resident: Collection[int]
) -> list[npt.NDArray[np.bool_]]:
    """Masks [T, K] of the routes of each wave, of at most `slots` distinct experts.

    Residents come first, so that no wave evicts an expert that a later one needs; then by id.
    Padded entries (-1) are in no wave.
    """
    active = sorted({int(e) for e in np.unique(topk_ids) if e >= 0})
    order = sorted(active, key=lambda expert: expert not in resident)
    return [
        np.isin(topk_ids, order[begin : begin + slots]) for begin in range(0, len(order), slots)
    ]
