"""Copies of expert records into slots and stream buffers, steered by tensors on the device.

Records lie in host memory that the device can read (pinned), or in device memory. Their address is
a plain kernel argument and never comes out of a table: reading pinned memory through addresses
loaded from device memory faults on gfx1201. All offsets are of 16 bytes and more, so every thread
moves 16 bytes at a time, and several of them before it waits for the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.compile_cases import CompileCase
from freetoken.kernels.triton.lru import AT_COUNT, AT_PENDING, COUNT, PENDING, LruState

_WORD_BYTES = 4
_CHUNK_WORDS = 4096  # 16 KiB: 128 bytes of each of 128 threads under way at once
_WARPS = 4
_FETCH_PROGRAMS = 16  # per record: 256 KiB under way, enough to cover a bus's latency
_LAYER_PROGRAMS = 32  # a whole layer: few, for they run beside the layer before


def copy_fetched(
    state: LruState,
    records: Tensor,
    slots: Tensor,
    *,
    most: int,
    count_into: Tensor | None = None,
    steps: int = 1,
) -> None:
    """Copy the experts of state's fetch list from records uint8 [E, record_bytes] into slots uint8
    [S, record_bytes], and mark the fetch as no longer pending. `most` is at least its length.

    With `count_into` int64 [4] (steps, hits, fetched, CPU-computed), add `steps` and what the call
    found to it.
    """
    source, target = as_words(records), as_words(slots)
    words = target.shape[1]
    programs = min(_FETCH_PROGRAMS, triton.cdiv(words, _CHUNK_WORDS))
    _copy_fetched[(max(1, min(most, len(slots))), programs)](
        source,
        target,
        state.fetch_experts,
        state.fetch_slots,
        state.status,
        state.found,
        state.found if count_into is None else count_into,
        steps,
        words,
        COUNTED=count_into is not None,
        CHUNK=_CHUNK_WORDS,
        num_warps=_WARPS,
    )


def copy_fetched_plain(state: LruState, records: Tensor, slots: Tensor) -> None:
    """`copy_fetched` from records that the device cannot read. The host reads what is to be copied
    and copies record by record, so this is no part of a graph."""
    count = int(state.status[COUNT])
    experts, targets = state.fetch_experts[:count].tolist(), state.fetch_slots[:count].tolist()
    for expert, slot in zip(experts, targets, strict=True):
        slots[slot].copy_(records[expert])
    state.status[PENDING] = 0


def copy_layer(
    state: LruState, records: Tensor, slots: Tensor, buffer: Tensor, used: Tensor | None = None
) -> None:
    """Bring every expert's record into buffer uint8 [E, record_bytes], row e: those that a slot
    holds from slots uint8 [S, record_bytes], the others from records uint8 [E, record_bytes].

    With `used` int32 [E] only the experts where it is not zero. Nothing but buffer changes.
    """
    target = as_words(buffer)
    experts, words = target.shape
    chunks = triton.cdiv(words, _CHUNK_WORDS)
    programs = min(_LAYER_PROGRAMS, experts * chunks)
    _copy_layer[(programs,)](
        as_words(records),
        as_words(slots),
        target,
        state.slot_of,
        state.status,
        state.status if used is None else used,
        words,
        chunks,
        experts * chunks,
        programs,
        ALL=used is None,
        CHUNK=_CHUNK_WORDS,
        num_warps=_WARPS,
    )


def copy_layer_by_engine(records: Tensor, buffer: Tensor) -> None:
    """All of records into buffer, both uint8 [E, record_bytes], by the device's copy engine on the
    current stream. It takes no processors from kernels, but cannot know what lies in slots. From
    records that are not pinned it works too; then the host waits for most of it."""
    buffer.copy_(records, non_blocking=True)


def copy_used_plain(used: Tensor, records: Tensor, buffer: Tensor) -> None:
    """The experts where used int32 [E] is not zero from records that the device cannot read into
    buffer, both uint8 [E, record_bytes]. The host reads `used`, so this is no part of a graph."""
    for expert in used.nonzero().flatten().tolist():
        buffer[expert].copy_(records[expert])


def as_words(records: Tensor) -> Tensor:
    """uint8 [n, record_bytes] as int32 [n, record_words]: kernels load four words at once.

    Raises ValueError if records are not contiguous multiples of 16 bytes.
    """
    if records.dtype != torch.uint8 or not records.is_contiguous() or records.shape[1] % 16:
        raise ValueError(
            f"records are {records.dtype} {list(records.shape)} with strides {records.stride()}; "
            "expected contiguous uint8 rows of a multiple of 16 bytes"
        )
    return records.view(torch.int32)


@triton.jit(do_not_specialize=["steps"])
def _copy_fetched(
    records_ptr,
    slots_ptr,
    fetch_experts_ptr,
    fetch_slots_ptr,
    status_ptr,
    found_ptr,
    counts_ptr,
    steps,
    record_words,
    COUNTED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    fetch = tl.program_id(0)
    part = tl.program_id(1)
    if (fetch == 0) & (part == 0):
        # Whatever follows on the stream runs after the whole launch, so this may be said now.
        tl.store(status_ptr + AT_PENDING, 0)
        if COUNTED:
            tl.store(counts_ptr, tl.load(counts_ptr) + steps)
            for i in tl.static_range(3):
                found = tl.load(found_ptr + i)
                tl.store(counts_ptr + 1 + i, tl.load(counts_ptr + 1 + i) + found)
    if fetch < tl.load(status_ptr + AT_COUNT):
        expert = tl.load(fetch_experts_ptr + fetch).to(tl.int64)
        slot = tl.load(fetch_slots_ptr + fetch).to(tl.int64)
        source = records_ptr + expert * record_words
        target = slots_ptr + slot * record_words
        for first in range(part * CHUNK, record_words, CHUNK * tl.num_programs(1)):
            at = first + tl.arange(0, CHUNK)
            inside = at < record_words
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["chunks", "units", "programs"])
def _copy_layer(
    records_ptr,
    slots_ptr,
    buffer_ptr,
    slot_of_ptr,
    status_ptr,
    used_ptr,
    record_words,
    chunks,
    units,
    programs,
    ALL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # While a fetch is pending, slots are assigned that hold something else: then none is trusted.
    trusted = tl.load(status_ptr + AT_PENDING) == 0
    for unit in range(tl.program_id(0), units, programs):
        expert = unit // chunks
        wanted = True if ALL else tl.load(used_ptr + expert) != 0
        if wanted:
            at = unit % chunks * CHUNK + tl.arange(0, CHUNK)
            inside = at < record_words
            slot = tl.load(slot_of_ptr + expert)
            target = buffer_ptr + expert.to(tl.int64) * record_words + at
            if trusted & (slot >= 0):
                source = slots_ptr + slot.to(tl.int64) * record_words + at
                tl.store(target, tl.load(source, mask=inside), mask=inside)
            else:
                source = records_ptr + expert.to(tl.int64) * record_words + at
                tl.store(target, tl.load(source, mask=inside), mask=inside)


_INT32 = dict.fromkeys(("records_ptr", "slots_ptr", "status_ptr"), "*i32")
_OPTIONS = {"num_warps": _WARPS, "num_stages": 2}

COMPILE_CASES = [
    CompileCase(
        "copy_fetched",
        _copy_fetched,
        _INT32
        | dict.fromkeys(("fetch_experts_ptr", "fetch_slots_ptr"), "*i32")
        | {"found_ptr": "*i64", "counts_ptr": "*i64", "steps": "i32", "record_words": "i32"},
        {"COUNTED": True, "CHUNK": _CHUNK_WORDS},
        _OPTIONS,
    ),
    CompileCase(
        "copy_layer",
        _copy_layer,
        _INT32
        | dict.fromkeys(("buffer_ptr", "slot_of_ptr", "used_ptr"), "*i32")
        | dict.fromkeys(("record_words", "chunks", "units", "programs"), "i32"),
        {"ALL": False, "CHUNK": _CHUNK_WORDS},
        _OPTIONS,
    ),
]
