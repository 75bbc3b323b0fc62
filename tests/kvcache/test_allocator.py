"""Page bookkeeping."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.errors import CapacityError
from freetoken.kvcache import PageAllocator, pages_for


def test_pages_for_rounds_up() -> None:
    assert [pages_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_page_zero_is_never_handed_out() -> None:
    allocator = PageAllocator(4)
    assert sorted(allocator.allocate(3)) == [1, 2, 3]
    assert (allocator.capacity, allocator.available, allocator.used) == (3, 0, 3)


def test_too_many_pages_are_refused_and_nothing_is_taken() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(2)
    with pytest.raises(CapacityError, match="2 key-value pages asked for, 1 of 3"):
        allocator.allocate(2)
    assert allocator.available == 1


def test_a_cache_without_room_for_tokens_is_refused() -> None:
    with pytest.raises(CapacityError, match="at least 2"):
        PageAllocator(1)


@pytest.mark.parametrize("pages", [[3], [0], [1, 1], [99]])
def test_freeing_what_is_not_in_use_is_refused(pages: list[int]) -> None:
    allocator = PageAllocator(5)
    allocator.allocate(2)
    with pytest.raises(ValueError, match="freed twice or never handed out"):
        allocator.free(pages)
    allocator.check_integrity()
    assert allocator.used == 2


def test_fresh_pages_ascend_and_freed_ones_come_first() -> None:
    allocator = PageAllocator(10)
    first = allocator.allocate(3)
    assert first == [1, 2, 3]
    allocator.free(first)
    assert allocator.allocate(4) == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", ["lost", "twice", "both"])
def test_check_integrity_finds_damage(damage: str) -> None:
    allocator = PageAllocator(5)
    page = allocator.allocate(1)[0]
    if damage == "lost":
        allocator._used.clear()
    elif damage == "twice":
        allocator._free.append(allocator._free[0])
    else:
        allocator._free.append(page)
    with pytest.raises(AssertionError):
        allocator.check_integrity()


@given(st.lists(st.integers(0, 6), max_size=60))
def test_random_use_keeps_integrity(sizes: list[int]) -> None:
    allocator = PageAllocator(17)
    held: list[list[int]] = []
    for size in sizes:
        if size <= allocator.available:
            held.append(allocator.allocate(size))
        elif held:
            allocator.free(held.pop(0))
        allocator.check_integrity()
        pages = [page for taken in held for page in taken]
        assert len(set(pages)) == len(pages) == allocator.used
