"""The decoder: one class for every family, put together from a DecoderSpec by the loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.kernels.base import Matrix, Ops
from freetoken.kvcache import KVCache
from freetoken.layers.attention import PagedAttention
from freetoken.layers.linear import Linear
from freetoken.layers.mlp import GatedMlp
from freetoken.layers.moe import OffloadMoELayer
from freetoken.models.batch import ForwardBatch
from freetoken.models.rotary import rotation
from freetoken.models.spec import DecoderSpec


@dataclass(frozen=True)
class DecoderLayer:
    """Norm weights float32 [H]; a dense layer or a MoE layer."""

    attention_norm: Tensor
    attention: PagedAttention
    mlp_norm: Tensor
    mlp: GatedMlp | OffloadMoELayer


class Decoder:
    """Token ids in, logits out. Holds weights alone; the key-value cache is the caller's."""

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        *,
        embedding: Matrix,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        lm_head: Linear,
    ) -> None:
        self.spec = spec
        self._ops = ops
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._frequencies = torch.tensor(
            spec.rotary.inverse_frequencies, dtype=torch.float32, device=ops.device
        )

    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, R/2], of positions int32 [T] on the operators' device."""
        return rotation(self.spec.rotary, self._frequencies, positions)

    def forward(
        self, batch: ForwardBatch, kv: KVCache, rotations: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Logits float32 [R, vocab] of the tokens `batch.logit_rows`. Writes `kv`. The batch may
        lie on the host, the cache on the operators' device. `rotations`: those of
        `batch.positions`, where they have been computed already."""
        ops, eps = self._ops, self.spec.norm_eps
        batch = batch.to(ops.device)
        padded = batch.sequence < 0 if batch.may_be_padded else None
        if rotations is None:
            rotations = self.rotations(batch.positions)
        residual = ops.embed(batch.token_ids, self._embedding)
        x = torch.zeros_like(residual)
        for layer, keys, values in zip(self._layers, kv.keys, kv.values, strict=True):
            x = ops.add_rms_norm(x, residual, layer.attention_norm, eps)
            x = layer.attention.forward(x, rotations, batch, keys, values)
            x = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = layer.mlp.forward(x, batch.phase, padded)
        rows = batch.logit_rows
        if len(rows) != len(x):  # they are distinct and in order: as many are all of them
            x, residual = x[rows], residual[rows]
        x = ops.add_rms_norm(x, residual, self._final_norm, eps)
        return self._lm_head(x)
