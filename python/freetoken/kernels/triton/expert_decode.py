"""Experts of a few tokens: every route reads the weights of its expert, where they lie.

Two kernels, gate and up with the activation, then down, with float32 between them;
`sum_routes_kernel` adds up. Programs of the same rows lie side by side, so that routes to one
expert find its weights in the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.activations import gated
from freetoken.kernels.triton.products import row_products


@triton.jit
def is_active(slot, weight):
    """Whether a route counts; a weight that is no number does."""
    return (slot >= 0) & (weight != 0.0)


@triton.jit
def pair_products(
    record,
    rows,
    row_mask,
    x_ptr,
    COLS: tl.constexpr,
    DOT: tl.constexpr,
    GATE_CODES: tl.constexpr,
    UP_CODES: tl.constexpr,
    GATE_SCALES: tl.constexpr,
    UP_SCALES: tl.constexpr,
    CODE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`row_products` of two matrices of one format at once, which reads x once."""
    ROWS: tl.constexpr = rows.shape[0]
    is_up = (tl.arange(0, 2) == 1)[None, :]
    codes = tl.where(is_up, UP_CODES, GATE_CODES) + (rows * CODE_STRIDE)[:, None]
    scales = tl.where(is_up, UP_SCALES, GATE_SCALES)
    scales = scales + (rows // SCALE_ROWS * SCALE_STRIDE)[:, None]
    both = tl.broadcast_to(row_mask[:, None], (ROWS, 2))
    codes = record + tl.reshape(codes, (2 * ROWS,))
    scales = record + tl.reshape(scales, (2 * ROWS,))
    both = tl.reshape(both, (2 * ROWS,))
    sums = DOT(codes, scales, both, x_ptr, 0, COLS, BLOCK_K)
    for k0 in tl.range(BLOCK_K, COLS, BLOCK_K):
        sums += DOT(codes, scales, both, x_ptr, k0, COLS, BLOCK_K)
    return tl.split(tl.reshape(tl.sum(sums, axis=1), (ROWS, 2)))


@triton.jit
def times_factor_plus_bias(sums, record, rows, row_mask, FACTOR: tl.constexpr, BIAS: tl.constexpr):
    """Sums with the expert's factor and bias, if it has them: `rows` and `sums` end alike."""
    if FACTOR >= 0:
        sums *= tl.load((record + FACTOR).to(tl.pointer_type(tl.float32)))
    if BIAS >= 0:
        pointers = (record + BIAS).to(tl.pointer_type(tl.float32)) + rows
        sums += tl.load(pointers, mask=row_mask, other=0.0)
    return sums


@triton.jit
def gate_up_kernel(
    x_ptr,
    weights_ptr,
    ids_ptr,
    records_ptr,
    inner_ptr,
    TOP_K: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    GATE_DOT: tl.constexpr,
    GATE_TILE: tl.constexpr,
    GATE_CODES: tl.constexpr,
    GATE_SCALES: tl.constexpr,
    GATE_CODE_STRIDE: tl.constexpr,
    GATE_SCALE_STRIDE: tl.constexpr,
    GATE_SCALE_ROWS: tl.constexpr,
    GATE_WHOLE_UNITS: tl.constexpr,
    GATE_FACTOR: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    UP_DOT: tl.constexpr,
    UP_TILE: tl.constexpr,
    UP_CODES: tl.constexpr,
    UP_SCALES: tl.constexpr,
    UP_CODE_STRIDE: tl.constexpr,
    UP_SCALE_STRIDE: tl.constexpr,
    UP_SCALE_ROWS: tl.constexpr,
    UP_WHOLE_UNITS: tl.constexpr,
    UP_FACTOR: tl.constexpr,
    UP_BIAS: tl.constexpr,
    TOGETHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """inner[route] = act(gate x) * up x: x float32 [T, H], inner float32 [T * K, I]. A program has
    ROWS rows of both matrices. TOGETHER: they have one format, and whole units."""
    route = tl.program_id(0)
    slot = tl.load(ids_ptr + route)
    weight = tl.load(weights_ptr + route)
    if is_active(slot, weight):
        record = records_ptr + slot.to(tl.int64) * RECORD_BYTES
        x_ptr += (route // TOP_K).to(tl.int64) * H
        rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        row_mask = rows < I
        if TOGETHER:
            gate, up = pair_products(
                record,
                rows,
                row_mask,
                x_ptr,
                H,
                GATE_DOT,
                GATE_CODES,
                UP_CODES,
                GATE_SCALES,
                UP_SCALES,
                GATE_CODE_STRIDE,
                GATE_SCALE_STRIDE,
                GATE_SCALE_ROWS,
                BLOCK_K,
            )
        else:
            gate = row_products(
                record + GATE_CODES,
                record + GATE_SCALES,
                rows,
                row_mask,
                x_ptr,
                H,
                GATE_CODE_STRIDE,
                GATE_SCALE_STRIDE,
                GATE_DOT,
                GATE_TILE,
                GATE_SCALE_ROWS,
                GATE_WHOLE_UNITS,
                BLOCK_K,
            )
            up = row_products(
                record + UP_CODES,
                record + UP_SCALES,
                rows,
                row_mask,
                x_ptr,
                H,
                UP_CODE_STRIDE,
                UP_SCALE_STRIDE,
                UP_DOT,
                UP_TILE,
                UP_SCALE_ROWS,
                UP_WHOLE_UNITS,
                BLOCK_K,
            )
        gate = times_factor_plus_bias(gate, record, rows, row_mask, GATE_FACTOR, GATE_BIAS)
        up = times_factor_plus_bias(up, record, rows, row_mask, UP_FACTOR, UP_BIAS)
        inner = gated(gate, up, ALPHA, LIMIT, ACTIVATION)
        tl.store(inner_ptr + route.to(tl.int64) * I + rows, inner, mask=row_mask)


@triton.jit
def down_kernel(
    inner_ptr,
    weights_ptr,
    ids_ptr,
    records_ptr,
    terms_ptr,
    RECORD_BYTES: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    DOWN_DOT: tl.constexpr,
    DOWN_TILE: tl.constexpr,
    DOWN_CODES: tl.constexpr,
    DOWN_SCALES: tl.constexpr,
    DOWN_CODE_STRIDE: tl.constexpr,
    DOWN_SCALE_STRIDE: tl.constexpr,
    DOWN_SCALE_ROWS: tl.constexpr,
    DOWN_WHOLE_UNITS: tl.constexpr,
    DOWN_FACTOR: tl.constexpr,
    DOWN_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """terms[route] = weight * (down inner[route]): inner float32 [T * K, I], terms float32
    [T * K, H]; nothing is written for a route that does not count."""
    route = tl.program_id(0)
    slot = tl.load(ids_ptr + route)
    weight = tl.load(weights_ptr + route)
    if is_active(slot, weight):
        record = records_ptr + slot.to(tl.int64) * RECORD_BYTES
        rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        row_mask = rows < H
        sums = row_products(
            record + DOWN_CODES,
            record + DOWN_SCALES,
            rows,
            row_mask,
            inner_ptr + route.to(tl.int64) * I,
            I,
            DOWN_CODE_STRIDE,
            DOWN_SCALE_STRIDE,
            DOWN_DOT,
            DOWN_TILE,
            DOWN_SCALE_ROWS,
            DOWN_WHOLE_UNITS,
            BLOCK_K,
        )
        sums = times_factor_plus_bias(sums, record, rows, row_mask, DOWN_FACTOR, DOWN_BIAS)
        tl.store(terms_ptr + route.to(tl.int64) * H + rows, weight * sums, mask=row_mask)


@triton.jit
def sum_routes_kernel(
    terms_ptr,
    weights_ptr,
    ids_ptr,
    out_ptr,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[token] = the terms of its routes, added in float64 in their order: terms float32
    [T * K, H], out float64 [T, H]."""
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for k in tl.static_range(TOP_K):
        route = token * TOP_K + k
        active = is_active(tl.load(ids_ptr + route), tl.load(weights_ptr + route))
        there = columns < tl.where(active, H, 0)
        term = tl.load(terms_ptr + route * H + columns, mask=there, other=0.0)
        total += term.to(tl.float64)
    tl.store(out_ptr + token * H + columns, total, mask=columns < H)
