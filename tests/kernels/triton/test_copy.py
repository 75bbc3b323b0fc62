"""Copies of records against plain indexing."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels.triton.copy import as_words, copy_fetched, copy_layer, copy_layer_by_engine
from freetoken.kernels.triton.lru import COUNT, PENDING, LruState

SIZES = [256, 16384, 16384 + 256, 70 * 1024]


def random_records(
    count: int, record_bytes: int, device: str, *, host: bool = False
) -> torch.Tensor:
    records = torch.randint(0, 256, (count, record_bytes), dtype=torch.uint8)
    if device == "cpu":
        return records
    return records.pin_memory() if host else records.to(device)


def fetched(pairs: list[tuple[int, int]], experts: int, slots: int, device: str) -> LruState:
    """A state in which those (expert, slot) are to be copied."""
    state = LruState.empty(experts, slots, device)
    for i, (expert, slot) in enumerate(pairs):
        state.fetch_experts[i], state.fetch_slots[i] = expert, slot
        state.slot_of[expert] = slot
    state.status[COUNT] = len(pairs)
    state.status[PENDING] = 1
    return state


@pytest.mark.parametrize("record_bytes", SIZES)
@pytest.mark.parametrize("pairs", [[], [(6, 0)], [(0, 3), (6, 1), (2, 2)]])
def test_the_fetch_list_is_copied_and_nothing_else(
    device: str, record_bytes: int, pairs: list[tuple[int, int]]
) -> None:
    records = random_records(7, record_bytes, device, host=True)
    slots = random_records(4, record_bytes, device)
    expected = slots.cpu().clone()
    for expert, slot in pairs:
        expected[slot] = records[expert]
    state = fetched(pairs, 7, 4, device)
    copy_fetched(state, records, slots, most=3)
    assert torch.equal(slots.cpu(), expected)
    assert state.status.tolist() == [len(pairs), 0, 0, 0]


def test_a_launch_for_no_more_than_it_may_need(device: str) -> None:
    """A grid smaller than the list leaves the rest: the caller's `most` bounds it."""
    records, slots = random_records(3, 256, device), torch.zeros(2, 256, dtype=torch.uint8)
    slots = slots.to(device)
    copy_fetched(fetched([(1, 0)], 3, 2, device), records, slots, most=1)
    assert torch.equal(slots[0].cpu(), records[1].cpu()) and not slots[1].any()
    copy_fetched(fetched([(2, 1)], 3, 2, device), records, slots, most=100)
    assert torch.equal(slots[1].cpu(), records[2].cpu())
    slots.zero_()
    copy_fetched(fetched([(2, 1), (0, 0)], 3, 2, device), records, slots, most=1)
    assert torch.equal(slots[1].cpu(), records[2].cpu()) and not slots[0].any()


def test_counts_are_added_where_asked(device: str) -> None:
    records, slots = random_records(3, 256, device), random_records(2, 256, device)
    state = fetched([(1, 0)], 3, 2, device)
    state.found.copy_(torch.tensor([5, 1, 2**40]))
    row = torch.tensor([10, 20, 30, 40], device=device)
    copy_fetched(state, records, slots, most=2, count_into=row, steps=1)
    assert row.tolist() == [11, 25, 31, 40 + 2**40]
    copy_fetched(state, records, slots, most=2, count_into=row, steps=0)
    assert row.tolist() == [11, 30, 32, 40 + 2**41]
    copy_fetched(state, records, slots, most=2)
    assert row.tolist() == [11, 30, 32, 40 + 2**41]


@pytest.mark.parametrize("record_bytes", SIZES)
def test_a_layer_comes_from_slots_where_it_can(device: str, record_bytes: int) -> None:
    records = random_records(5, record_bytes, device, host=True)
    slots = random_records(2, record_bytes, device)  # other bytes, so that it shows
    state = LruState.empty(5, 2, device)
    state.slot_of[3], state.slot_of[0] = 0, 1
    buffer = torch.zeros_like(records, device=device)
    copy_layer(state, records, slots, buffer)
    expected = records.cpu().clone()
    expected[3], expected[0] = slots[0].cpu(), slots[1].cpu()
    assert torch.equal(buffer.cpu(), expected)


def test_slots_that_wait_for_a_copy_are_not_taken(device: str) -> None:
    records, slots = random_records(5, 512, device), random_records(2, 512, device)
    state = fetched([(4, 1)], 5, 2, device)
    buffer = torch.zeros_like(records)
    copy_layer(state, records, slots, buffer)
    assert torch.equal(buffer.cpu(), records.cpu())


def test_only_used_experts_are_brought(device: str) -> None:
    records, slots = random_records(5, 512, device), random_records(2, 512, device)
    state = LruState.empty(5, 2, device)
    state.slot_of[1], state.slot_of[2] = 1, 0
    buffer = torch.zeros_like(records)
    used = torch.tensor([1, 1, 0, 0, 1], dtype=torch.int32, device=device)
    copy_layer(state, records, slots, buffer, used)
    expected = records.cpu() * used.cpu()[:, None]
    expected[1] = slots[1].cpu()
    assert torch.equal(buffer.cpu(), expected.to(torch.uint8))


def test_the_copy_engine_copies_all(device: str) -> None:
    records = random_records(5, 512, device, host=True)
    buffer = torch.zeros_like(records, device=device)
    copy_layer_by_engine(records, buffer)
    assert torch.equal(buffer.cpu(), records)


def test_records_that_threads_cannot_load_whole_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 24\].*multiple of 16 bytes"):
        as_words(torch.zeros(2, 24, dtype=torch.uint8))
    with pytest.raises(ValueError, match="contiguous uint8"):
        as_words(torch.zeros(2, 64, dtype=torch.uint8)[:, :32])
    with pytest.raises(ValueError, match=r"torch.int32"):
        as_words(torch.zeros(2, 16, dtype=torch.int32))
