"""One step's work for a decoder: a flattened batch of tokens from several sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.moe.phase import Phase

__all__ = ["ForwardBatch", "Phase"]


@dataclass(frozen=True)
class ForwardBatch:
    """T tokens of S sequences.

    token_ids int64 [T]; positions int32 [T]; sequence int32 [T], the row of `block_table` that a
    token belongs to; kv_slots int64 [T], where its key and value go; block_table int32 [S, P], the
    pages of each sequence (unused entries 0); logit_rows int64 [R], the tokens whose logits are
    wanted. In a decode step a padded row has token id 0, kv slot in the reserved page 0, and
    `sequence` -1: it is computed by nobody and its logits are not asked for. `may_be_padded` says
    whether there can be such rows (a batch that is replayed from a graph: always).
    """

    phase: Phase
    token_ids: Tensor
    positions: Tensor
    sequence: Tensor
    kv_slots: Tensor
    block_table: Tensor
    logit_rows: Tensor
    may_be_padded: bool = False

    def to(self, device: torch.device) -> ForwardBatch:
        """The batch on a device; itself if it is there."""
        if self.token_ids.device == device:
            return self
        return ForwardBatch(
            phase=self.phase,
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            sequence=self.sequence.to(device),
            kv_slots=self.kv_slots.to(device),
            block_table=self.block_table.to(device),
            logit_rows=self.logit_rows.to(device),
            may_be_padded=self.may_be_padded,
        )
