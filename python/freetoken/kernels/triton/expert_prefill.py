"""Experts of many tokens: routes in the order of their experts, multiplied on tensor cores.

`sort_routes_kernel` puts the routes that count in order, without the host knowing how many each
expert has. The grid of the two products is an upper bound: the tiles of all experts if each had one
that is not full. Activations and weights are rounded to bfloat16, sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.activations import gated
from freetoken.kernels.triton.expert_decode import is_active, times_factor_plus_bias
from freetoken.kernels.triton.products import dot


@triton.jit(do_not_specialize=["routes"])
def sort_routes_kernel(
    weights_ptr,
    ids_ptr,
    starts_ptr,
    counts_ptr,
    order_ptr,
    routes,
    BLOCK: tl.constexpr,
):
    """The routes of one expert: order[starts[e] .. + counts[e] - 1] are their numbers, ascending.
    starts, counts int32 [E], order int32 [routes]. One program per expert."""
    expert = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    mine = tl.zeros([BLOCK], tl.int32)
    for first in range(0, routes, BLOCK):
        slot = _active_slots(weights_ptr, ids_ptr, first, routes, BLOCK)
        before += ((slot >= 0) & (slot < expert)).to(tl.int32)
        mine += (slot == expert).to(tl.int32)
    start = tl.sum(before, axis=0)
    count = tl.sum(mine, axis=0)
    tl.store(starts_ptr + expert, start)
    tl.store(counts_ptr + expert, count)
    if count > 0:
        for first in range(0, routes, BLOCK):
            slot = _active_slots(weights_ptr, ids_ptr, first, routes, BLOCK)
            found = (slot == expert).to(tl.int32)
            places = start + tl.cumsum(found, axis=0) - 1
            tl.store(order_ptr + places, first + tl.arange(0, BLOCK), mask=slot == expert)
            start += tl.sum(found, axis=0)


@triton.jit
def _active_slots(weights_ptr, ids_ptr, first, routes, BLOCK: tl.constexpr):
    """Slots of the routes from `first` on, -1 for those that do not count."""
    route = first + tl.arange(0, BLOCK)
    slot = tl.load(ids_ptr + route, mask=route < routes, other=-1)
    weight = tl.load(weights_ptr + route, mask=route < routes, other=0.0)
    return tl.where(is_active(slot, weight), slot, -1)


@triton.jit
def find_tile(
    starts_ptr, counts_ptr, tile, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr
):
    """The expert that a tile of BM sorted routes belongs to (EXPERTS: none), where its routes
    begin, how many it has, and how many of them lie in tiles before this one."""
    experts = tl.arange(0, PADDED)
    tiles = tl.cdiv(tl.load(counts_ptr + experts, mask=experts < EXPERTS, other=0), BM)
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    expert = tl.minimum(expert, EXPERTS)  # not one that only fills up the power of two
    done = tl.sum(tl.where(experts < expert, tiles, 0), axis=0)
    there = expert < EXPERTS
    start = tl.load(starts_ptr + expert, mask=there, other=0)
    count = tl.load(counts_ptr + expert, mask=there, other=0)
    return expert, start, count, (tile - done) * BM


@triton.jit
def gate_up_tiles_kernel(
    x_ptr,
    starts_ptr,
    counts_ptr,
    order_ptr,
    records_ptr,
    inner_ptr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    GATE_TILE: tl.constexpr,
    GATE_CODES: tl.constexpr,
    GATE_SCALES: tl.constexpr,
    GATE_CODE_STRIDE: tl.constexpr,
    GATE_SCALE_STRIDE: tl.constexpr,
    GATE_FACTOR: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    UP_TILE: tl.constexpr,
    UP_CODES: tl.constexpr,
    UP_SCALES: tl.constexpr,
    UP_CODE_STRIDE: tl.constexpr,
    UP_SCALE_STRIDE: tl.constexpr,
    UP_FACTOR: tl.constexpr,
    UP_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """inner[i] = act(gate x) * up x of the i-th sorted route: x bfloat16 [T, H], inner [T * K, I]
    in bfloat16 or float32."""
    expert, start, count, first = find_tile(
        starts_ptr, counts_ptr, tl.program_id(0), EXPERTS, PADDED, BM
    )
    if expert < EXPERTS:
        record = records_ptr + expert.to(tl.int64) * RECORD_BYTES
        lines = first + tl.arange(0, BM)
        line_mask = lines < count
        route = tl.load(order_ptr + start + lines, mask=line_mask, other=0)
        x_lines = x_ptr + (route // TOP_K).to(tl.int64)[:, None] * H
        rows = tl.program_id(1) * BN + tl.arange(0, BN)
        row_mask = rows < I
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for k0 in range(0, H, BK):
            k = k0 + tl.arange(0, BK)
            mask = line_mask[:, None] & (k < H)[None, :]
            x = tl.load(x_lines + k[None, :], mask=mask, other=0.0)
            w = GATE_TILE(
                record + GATE_CODES,
                record + GATE_SCALES,
                rows,
                row_mask,
                k0,
                H,
                GATE_CODE_STRIDE,
                GATE_SCALE_STRIDE,
                BK,
            )
            gate = dot(x, tl.trans(w.to(tl.bfloat16)), gate)
            w = UP_TILE(
                record + UP_CODES,
                record + UP_SCALES,
                rows,
                row_mask,
                k0,
                H,
                UP_CODE_STRIDE,
                UP_SCALE_STRIDE,
                BK,
            )
            up = dot(x, tl.trans(w.to(tl.bfloat16)), up)
        columns, column_mask = rows[None, :], row_mask[None, :]
        gate = times_factor_plus_bias(gate, record, columns, column_mask, GATE_FACTOR, GATE_BIAS)
        up = times_factor_plus_bias(up, record, columns, column_mask, UP_FACTOR, UP_BIAS)
        inner = gated(gate, up, ALPHA, LIMIT, ACTIVATION).to(inner_ptr.dtype.element_ty)
        pointers = inner_ptr + (start + lines).to(tl.int64)[:, None] * I + columns
        tl.store(pointers, inner, mask=line_mask[:, None] & column_mask)


@triton.jit
def down_tiles_kernel(
    inner_ptr,
    weights_ptr,
    starts_ptr,
    counts_ptr,
    order_ptr,
    records_ptr,
    terms_ptr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    DOWN_TILE: tl.constexpr,
    DOWN_CODES: tl.constexpr,
    DOWN_SCALES: tl.constexpr,
    DOWN_CODE_STRIDE: tl.constexpr,
    DOWN_SCALE_STRIDE: tl.constexpr,
    DOWN_FACTOR: tl.constexpr,
    DOWN_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """terms[route] = weight * (down inner[i]) of the i-th sorted route: terms float32 [T * K, H];
    nothing is written for a route that does not count."""
    expert, start, count, first = find_tile(
        starts_ptr, counts_ptr, tl.program_id(0), EXPERTS, PADDED, BM
    )
    if expert < EXPERTS:
        record = records_ptr + expert.to(tl.int64) * RECORD_BYTES
        lines = first + tl.arange(0, BM)
        line_mask = lines < count
        inner_lines = inner_ptr + (start + lines).to(tl.int64)[:, None] * I
        rows = tl.program_id(1) * BN + tl.arange(0, BN)
        row_mask = rows < H
        sums = tl.zeros([BM, BN], tl.float32)
        for k0 in range(0, I, BK):
            k = k0 + tl.arange(0, BK)
            mask = line_mask[:, None] & (k < I)[None, :]
            x = tl.load(inner_lines + k[None, :], mask=mask, other=0.0).to(tl.bfloat16)
            w = DOWN_TILE(
                record + DOWN_CODES,
                record + DOWN_SCALES,
                rows,
                row_mask,
                k0,
                I,
                DOWN_CODE_STRIDE,
                DOWN_SCALE_STRIDE,
                BK,
            )
            sums = dot(x, tl.trans(w.to(tl.bfloat16)), sums)
        columns, column_mask = rows[None, :], row_mask[None, :]
        sums = times_factor_plus_bias(sums, record, columns, column_mask, DOWN_FACTOR, DOWN_BIAS)
        route = tl.load(order_ptr + start + lines, mask=line_mask, other=0)
        weight = tl.load(weights_ptr + route, mask=line_mask, other=0.0)
        pointers = terms_ptr + route.to(tl.int64)[:, None] * H + columns
        tl.store(pointers, weight[:, None] * sums, mask=line_mask[:, None] & column_mask)
