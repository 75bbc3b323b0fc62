"""The experts of a bank on the GPU: two ways, chosen by the number of routes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from freetoken.kernels.triton.expert_bank import DeviceBank
from freetoken.kernels.triton.expert_decode import down_kernel, gate_up_kernel, sum_routes_kernel
from freetoken.kernels.triton.expert_prefill import (
    down_tiles_kernel,
    gate_up_tiles_kernel,
    sort_routes_kernel,
)
from freetoken.kernels.triton.expert_sizes import (
    DECODE_OPTIONS,
    DECODE_ROUTES,
    SORT_OPTIONS,
    SORT_ROUTES,
    SUM_COLUMNS,
    SUM_OPTIONS,
    TILE_COLUMNS,
    TILE_OPTIONS,
    down_constants,
    down_tiles_constants,
    gate_up_constants,
    gate_up_tiles_constants,
    most_tiles,
    sizes_for,
)
from freetoken.kernels.triton.fp8 import fp8_rounded


@dataclass
class ExpertScratch:
    """Memory for intermediate results of decode, which the layers of a model share: they run one
    after the other. It must not grow between the capture and the replay of a graph, so bind all
    kernels first."""

    inner: Tensor  # float32, at least DECODE_ROUTES * I
    terms: Tensor  # float32, at least DECODE_ROUTES * H

    @staticmethod
    def on(device: torch.device) -> ExpertScratch:
        """Empty."""
        return ExpertScratch(torch.empty(0, device=device), torch.empty(0, device=device))

    def reserve(self, inner: int, hidden: int) -> None:
        """Grow to what a layer of these sizes needs."""
        if self.inner.numel() < DECODE_ROUTES * inner:
            self.inner = self.inner.new_empty(DECODE_ROUTES * inner)
        if self.terms.numel() < DECODE_ROUTES * hidden:
            self.terms = self.terms.new_empty(DECODE_ROUTES * hidden)


class TritonExpertKernel:
    """`freetoken.kernels.base.ExpertMath` for a bank in the device's memory.

    Up to DECODE_ROUTES routes are computed in float32, more of them in bfloat16 with float32 sums.
    Nothing is read back to the host, and shapes alone decide what is launched.
    """

    def __init__(self, bank: DeviceBank, scratch: ExpertScratch | None = None) -> None:
        """Raises CheckpointError for a format or an activation without GPU kernel."""
        gate, down = bank.gate, bank.down
        self._records = bank.records
        self._experts = bank.experts
        self._hidden, self._inner = gate.cols, gate.rows
        self._scratch = scratch or ExpertScratch.on(bank.records.device)
        self._scratch.reserve(self._inner, self._hidden)
        self._round_x, self._round_inner = gate.kernels.reads_fp8, down.kernels.reads_fp8
        self._sizes = sizes_for(bank.records.device)
        self._gate_up = gate_up_constants(bank, self._sizes)
        self._down = down_constants(bank, self._sizes)
        self._gate_up_tiles = gate_up_tiles_constants(bank)
        self._down_tiles = down_tiles_constants(bank)
        self._gate_up_blocks = triton.cdiv(self._inner, self._gate_up["ROWS"])
        self._down_blocks = triton.cdiv(self._hidden, self._down["ROWS"])
        self._sum_blocks = triton.cdiv(self._hidden, SUM_COLUMNS)

    def __call__(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """See the protocol."""
        tokens, top_k = topk_ids.shape
        routes = tokens * top_k
        out = torch.empty((tokens, self._hidden), dtype=torch.float64, device=topk_ids.device)
        if routes == 0:
            return out.zero_()
        terms = (self._decode if routes <= DECODE_ROUTES else self._prefill)(
            hidden_states, topk_weights, topk_ids
        )
        sum_routes_kernel[(self._sum_blocks, tokens)](
            terms,
            topk_weights,
            topk_ids,
            out,
            TOP_K=top_k,
            H=self._hidden,
            BLOCK=SUM_COLUMNS,
            **SUM_OPTIONS,
        )
        return out

    def _decode(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Terms of all routes, float32 [T * K, H]; unwritten for those that do not count."""
        tokens, top_k = ids.shape
        routes = tokens * top_k
        inner, terms = self._scratch.inner, self._scratch.terms
        if self._round_x:
            x = fp8_rounded(x)
        gate_up_kernel[(routes, self._gate_up_blocks)](
            x, weights, ids, self._records, inner, TOP_K=top_k, **self._gate_up, **DECODE_OPTIONS
        )
        if self._round_inner:
            inner = fp8_rounded(inner[: routes * self._inner].view(routes, -1))
        down_kernel[(routes, self._down_blocks)](
            inner, weights, ids, self._records, terms, **self._down, **DECODE_OPTIONS
        )
        return terms

    def _prefill(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """As `_decode`."""
        tokens, top_k = ids.shape
        routes = tokens * top_k
        experts, hidden, inner_size = self._experts, self._hidden, self._inner
        starts, counts = ids.new_empty((2, experts))
        order = ids.new_empty(routes)
        sort_routes_kernel[(experts,)](
            weights, ids, starts, counts, order, routes, BLOCK=SORT_ROUTES, **SORT_OPTIONS
        )
        if self._round_x:
            x = fp8_rounded(x)
        x = x.to(torch.bfloat16)
        size = self._sizes.tile(routes, experts)
        tiles = most_tiles(routes, experts, size)
        inner = torch.empty(
            (routes, inner_size),
            dtype=torch.float32 if self._round_inner else torch.bfloat16,
            device=x.device,
        )
        gate_up_tiles_kernel[(tiles, triton.cdiv(inner_size, TILE_COLUMNS))](
            x,
            starts,
            counts,
            order,
            self._records,
            inner,
            TOP_K=top_k,
            BM=size,
            **self._gate_up_tiles,
            **TILE_OPTIONS[size],
        )
        if self._round_inner:
            inner = fp8_rounded(inner)
        terms = torch.empty((routes, hidden), device=x.device)
        down_tiles_kernel[(tiles, triton.cdiv(hidden, TILE_COLUMNS))](
            inner,
            weights,
            starts,
            counts,
            order,
            self._records,
            terms,
            BM=size,
            **self._down_tiles,
            **TILE_OPTIONS[size],
        )
        return terms
