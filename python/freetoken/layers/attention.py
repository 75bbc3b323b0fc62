"""Grouped-query attention over the paged key-value cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from freetoken.kernels.base import Ops
from freetoken.layers.linear import Linear, LinearGroup

if TYPE_CHECKING:
    from freetoken.models.batch import ForwardBatch
    from freetoken.models.spec import AttentionSpec


@dataclass(frozen=True)
class QkNorm:
    """RMS norms over each head of the queries and the keys, weights float32 [D]."""

    query: Tensor
    key: Tensor
    eps: float


class PagedAttention:
    """Project, normalise, rotate, store the new keys and values, attend, project back."""

    def __init__(
        self,
        ops: Ops,
        spec: AttentionSpec,
        *,
        query: Linear,
        key: Linear,
        value: Linear,
        output: Linear,
        norm: QkNorm | None,
        interleaved: bool,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self._ops = ops
        self._spec = spec
        self._qkv = LinearGroup(ops, query, key, value)
        self._output = output
        self._norm = norm
        self._interleaved = interleaved
        self._window = window
        self._sinks = sinks

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """x [T, H] -> [T, H]. `rotation` is cos and sin [T, R/2]; `keys` and `values` are the
        layer's caches [pages, page_tokens, Hk, D], written at `batch.kv_slots`."""
        ops, spec = self._ops, self._spec
        queries, new_keys, new_values = self._qkv(x)
        q = queries.view(-1, spec.heads, spec.head_dim)
        k = new_keys.view(-1, spec.kv_heads, spec.head_dim)
        v = new_values.view(-1, spec.kv_heads, spec.head_dim)
        if self._norm is not None:
            q = ops.rms_norm(q, self._norm.query, self._norm.eps)
            k = ops.rms_norm(k, self._norm.key, self._norm.eps)
        ops.rotary_(q, k, *rotation, interleaved=self._interleaved)
        ops.write_kv(k, v, keys, values, batch.kv_slots)
        attended = ops.paged_attention(
            q,
            keys,
            values,
            batch.block_table,
            batch.sequence,
            batch.positions,
            scale=spec.scale,
            window=self._window,
            sinks=self._sinks,
        )
        return self._output(attended.view(-1, spec.heads * spec.head_dim))
