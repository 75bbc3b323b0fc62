"""The kernels of attention over the paged cache: a softmax computed as the keys come by."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.products import dot


@triton.jit
def _attend(
    q,
    low,
    high,
    first,
    end,
    k_ptr,
    v_ptr,
    pages_ptr,
    head,
    kv_heads,
    largest,
    total,
    values,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Go on with the softmax of q [M, BLOCK_D] over the positions [first, end) of one sequence, of
    which each row sees those in [low, high]. Scores are base-2 logarithms.

    A share of zero times a value that is not finite is not zero. So that such values reach none but
    the rows that see them, those get a NaN if CAREFUL, and the value counts as zero."""
    d = tl.arange(0, BLOCK_D)
    for begin in range(first, end, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        exists = n < end
        page = tl.load(pages_ptr + n // PAGE_TOKENS, mask=exists, other=0).to(tl.int64)
        row = (page * PAGE_TOKENS + n % PAGE_TOKENS) * kv_heads + head
        at = row[:, None] * DIM + d[None, :]
        inside = exists[:, None] & (d < DIM)[None, :]
        k = tl.load(k_ptr + at, mask=inside, other=0.0)
        scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
        seen = (low[:, None] <= n[None, :]) & (n[None, :] <= high[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # a row that sees nothing yet
        shares = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        v = tl.load(v_ptr + at, mask=inside, other=0.0)
        values = values * shrink[:, None]
        if CAREFUL:
            finite = tl.abs(v) < float("inf")
            v = tl.where(finite, v, 0.0)
            broken = tl.max((finite == 0).to(tl.int32), axis=1)
            sees = tl.max(tl.where(seen, broken[None, :], 0), axis=1)
            values = tl.where((sees != 0)[:, None], float("nan"), values)
        values = dot(shares.to(v.dtype), v, values)
        total = total * shrink + tl.sum(shares, axis=1)
        largest = larger
    return largest, total, values


@triton.jit(do_not_specialize=["pages", "window"])  # another number, no other kernel
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    sequence_ptr,
    positions_ptr,
    partials_ptr,
    logs_ptr,
    kv_heads,
    pages,
    window,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token, one key head, one of SPLITS even shares of the positions that the token sees.

    Shares are whole blocks, so a short sequence has fewer of them than SPLITS, and no more than
    there are programs for. Writes the share's mean of values to partials [T, Hq, SPLITS, DIM], and
    the base-2 logarithm of its weight to logs [T, Hq, SPLITS]: zero and -inf for an empty share.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = tl.load(sequence_ptr + token)
    position = tl.load(positions_ptr + token)
    low = tl.maximum(position - window + 1, 0)
    end = tl.where(sequence < 0, low, position + 1)
    share = tl.cdiv(tl.cdiv(end - low, SPLITS), BLOCK_N) * BLOCK_N
    first = low + split * share

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q_head = (token * kv_heads + head) * GROUP + m
    inside = (m < GROUP)[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + q_head[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    everywhere = tl.zeros([BLOCK_M], tl.int32)
    largest, total, values = _attend(
        (q * scale).to(k_ptr.dtype.element_ty),
        everywhere,
        everywhere + position,
        first,
        tl.minimum(first + share, end),
        k_ptr,
        v_ptr,
        table_ptr + sequence.to(tl.int64) * pages,
        head,
        kv_heads,
        largest,
        total,
        values,
        DIM,
        PAGE_TOKENS,
        BLOCK_N,
        BLOCK_D,
        CAREFUL=False,  # all rows see the same positions
    )
    out = q_head * SPLITS + split
    mean = values / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(partials_ptr + out[:, None] * DIM + d[None, :], mean, mask=inside)
    tl.store(logs_ptr + out, largest + tl.log2(total), mask=m < GROUP)


@triton.jit(do_not_specialize=["written"])
def combine_kernel(
    partials_ptr,
    logs_ptr,
    sinks_ptr,
    sequence_ptr,
    out_ptr,
    heads,
    written,
    log2_e,
    HAS_SINKS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token and query head: the means of the shares, of which the first `written` are there,
    each by its weight. Zero for a padded row."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = token * heads + head
    d = tl.arange(0, BLOCK_D)
    split = tl.arange(0, SPLITS)
    inside = (split < written)[:, None] & (d < DIM)[None, :]
    logs = tl.load(logs_ptr + row * SPLITS + split, mask=split < written, other=float("-inf"))
    base = tl.max(logs, axis=0)
    base = tl.where(base == float("-inf"), 0.0, base)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head) * log2_e
        base = tl.maximum(base, sink)
    weights = tl.exp2(logs - base)
    total = tl.sum(weights, axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - base)
    total = tl.where(tl.load(sequence_ptr + token) < 0, 1.0, total)
    at = (row * SPLITS + split)[:, None] * DIM + d[None, :]
    parts = tl.load(partials_ptr + at, mask=inside, other=0.0)
    out = tl.sum(parts * weights[:, None], axis=0) / total
    tl.store(out_ptr + row * DIM + d, out, mask=d < DIM)


@triton.jit
def _attend_sequences(
    q,
    sequence,
    low,
    position,
    k_ptr,
    v_ptr,
    table_ptr,
    pages,
    head,
    kv_heads,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """The softmax of rows q [M, BLOCK_D], each over the positions [low, position] of its sequence:
    the largest score, the sum of shares and that of values by share.

    The rows' sequences are gone through one after the other, each over the positions that some row
    of it sees, from a multiple of BLOCK_N on, so that a row's sum does not depend on the others.
    """
    largest = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    values = tl.zeros([q.shape[0], BLOCK_D], tl.float32)
    waiting = sequence
    current = tl.max(waiting, axis=0)
    while current >= 0:
        own = sequence == current
        first = tl.min(tl.where(own, low, 0x7FFFFFFF), axis=0) // BLOCK_N * BLOCK_N
        high = tl.where(own, position, -1)
        largest, total, values = _attend(
            q,
            low,
            high,
            first,
            tl.max(high, axis=0) + 1,
            k_ptr,
            v_ptr,
            table_ptr + current.to(tl.int64) * pages,
            head,
            kv_heads,
            largest,
            total,
            values,
            DIM,
            PAGE_TOKENS,
            BLOCK_N,
            BLOCK_D,
            CAREFUL,
        )
        waiting = tl.where(own, -1, waiting)
        current = tl.max(waiting, axis=0)
    return largest, total, values


@triton.jit(do_not_specialize=["tokens", "pages", "window"])
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    sequence_ptr,
    positions_ptr,
    sinks_ptr,
    out_ptr,
    tokens,
    kv_heads,
    pages,
    window,
    scale,
    log2_e,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """BLOCK_M // GROUP tokens and one key head: the tile's rows are pairs of token and query head.

    CAREFUL is for a second launch, which computes those tiles anew that are not all finite, to find
    out whose that is. In one launch the two take more registers than there are.
    """
    # the last tiles see the most: they begin first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = tile.to(tl.int64) * (BLOCK_M // GROUP) + m // GROUP
    exists = (m < BLOCK_M // GROUP * GROUP) & (token < tokens)
    q_head = (token * kv_heads + head) * GROUP + m % GROUP
    inside = exists[:, None] & (d < DIM)[None, :]
    if CAREFUL:
        out = tl.load(out_ptr + q_head[:, None] * DIM + d[None, :], mask=inside, other=0.0)
        broken = tl.max((tl.abs(out) < float("inf")).to(tl.int32) ^ 1, axis=1)
        exists = exists & (token < tl.where(tl.max(broken, axis=0) != 0, tokens, 0))
        inside = exists[:, None] & (d < DIM)[None, :]
    sequence = tl.load(sequence_ptr + token, mask=exists, other=-1)
    position = tl.load(positions_ptr + token, mask=exists, other=0)
    low = tl.maximum(position - window + 1, 0)
    q = tl.load(q_ptr + q_head[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    q = (q * scale).to(k_ptr.dtype.element_ty)
    largest, total, values = _attend_sequences(
        q,
        sequence,
        low,
        position,
        k_ptr,
        v_ptr,
        table_ptr,
        pages,
        head,
        kv_heads,
        DIM,
        PAGE_TOKENS,
        BLOCK_N,
        BLOCK_D,
        CAREFUL,
    )
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head * GROUP + m % GROUP) * log2_e
        base = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.exp2(sink - base)
        values = values * shrink[:, None]
    values = values / tl.where(sequence < 0, 1.0, total)[:, None]
    tl.store(out_ptr + q_head[:, None] * DIM + d[None, :], values, mask=inside)
