"""How a GPU's memory is divided, and the bound on activations against what decoders allocate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.gpu_budget import GpuNeeds, divide

# The least of everything: 100 + 20 + 10 + 2 * 30 + 4 * 5 = 210.
NEEDS = GpuNeeds(
    weight_bytes=100,
    activation_bytes=20,
    buffer_bytes=10,
    slot_bytes=30,
    least_slots=2,
    most_slots=8,
    page_bytes=5,
    least_pages=4,
    most_pages=50,
)


@pytest.mark.parametrize(
    ("budget", "slots", "pages"),
    [
        (210, 2, 4),
        (239, 2, 9),  # 29 left: no slot, five pages
        (240, 3, 4),  # slots come first
        (390, 8, 4),
        (394, 8, 4),
        (395, 8, 5),
        (620, 8, 50),
        (10_000, 8, 50),  # more would be of no use
    ],
)
def test_the_least_then_slots_then_pages(budget: int, slots: int, pages: int) -> None:
    shares = divide(NEEDS, budget)
    assert shares is not None and (shares.slots, shares.pages) == (slots, pages)


def test_one_byte_too_little_does_not_fit() -> None:
    assert NEEDS.total_bytes == 210
    assert divide(NEEDS, 209) is None


def test_a_model_without_slots_gives_all_to_pages() -> None:
    needs = replace(NEEDS, slot_bytes=0, least_slots=0, most_slots=0, buffer_bytes=0)
    shares = divide(needs, 200)
    assert shares is not None and (shares.slots, shares.pages) == (0, 16)


@given(
    st.builds(
        GpuNeeds,
        weight_bytes=st.integers(0, 1000),
        activation_bytes=st.integers(0, 1000),
        buffer_bytes=st.integers(0, 1000),
        slot_bytes=st.integers(1, 500),
        least_slots=st.integers(1, 4),
        most_slots=st.integers(4, 9),
        page_bytes=st.integers(1, 100),
        least_pages=st.integers(1, 4),
        most_pages=st.integers(4, 9),
    ),
    st.integers(0, 10_000),
)
def test_nothing_is_exceeded_and_nothing_of_use_is_left(needs: GpuNeeds, budget: int) -> None:
    shares = divide(needs, budget)
    if shares is None:
        assert budget < needs.total_bytes
        return
    fixed = needs.weight_bytes + needs.activation_bytes + needs.buffer_bytes
    left = budget - fixed - shares.slots * needs.slot_bytes - shares.pages * needs.page_bytes
    assert left >= 0
    assert needs.least_slots <= shares.slots <= needs.most_slots
    assert needs.least_pages <= shares.pages <= needs.most_pages
    if shares.pages < needs.most_pages:
        assert left < needs.page_bytes
    if shares.slots < needs.most_slots:
        beyond_least = (shares.pages - needs.least_pages) * needs.page_bytes
        assert left + beyond_least < needs.slot_bytes
