"""Who is computed when, and who holds which pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.errors import CapacityError
from freetoken.kvcache import PageAllocator
from freetoken.scheduler import Request, RequestState, SamplingParams, Scheduler, StepPlan

PAGE_TOKENS = 4


def make(pages: int = 100, max_running: int = 8, budget: int = 10) -> Scheduler:
    return Scheduler(
        PageAllocator(pages),
        page_tokens=PAGE_TOKENS,
        max_running=max_running,
        prefill_budget_tokens=budget,
    )


def request(request_id: int, prompt: int, limit: int = 4) -> Request:
    return Request(request_id, range(prompt), SamplingParams(), seed=0, limit=limit)


def shape(plan: StepPlan | None) -> tuple[str, list[tuple[int, int, int]]]:
    assert plan is not None
    return plan.phase, [(c.request.id, c.start, c.count) for c in plan.chunks]


def apply(scheduler: Scheduler, plan: StepPlan) -> None:
    """What the engine does with a plan: count as computed, append a token, finish at the limit."""
    ending = [chunk.request for chunk in plan.chunks if chunk.reaches_end]
    for chunk in plan.chunks:
        chunk.request.computed += chunk.count
    for request in ending:
        request.tokens.append(0)
        if request.generated >= request.limit:
            scheduler.finish(request, "length")


def test_nothing_to_do() -> None:
    assert make().schedule() is None


def test_prompts_share_a_step_and_long_ones_are_cut_at_the_budget() -> None:
    scheduler = make(budget=10)
    for request_id, prompt in enumerate((3, 12, 2)):
        scheduler.submit(request(request_id, prompt))
    plans = []
    while (plan := scheduler.schedule()) is not None and len(plans) < 4:
        plans.append(shape(plan))
        apply(scheduler, plan)
    assert plans == [
        ("prefill", [(0, 0, 3), (1, 0, 7)]),
        ("decode", [(0, 3, 1)]),
        ("prefill", [(1, 7, 5), (2, 0, 2)]),
        ("decode", [(0, 4, 1), (1, 12, 1), (2, 2, 1)]),
    ]


def phases(scheduler: Scheduler, before_step: Callable[[int], None]) -> list[str]:
    """The phases of the steps until request 0 has left."""
    first = scheduler.waiting[0]
    found: list[str] = []
    while first.is_live:
        assert len(found) < 50, "starved"
        before_step(len(found))
        plan = scheduler.schedule()
        assert plan is not None
        found.append(plan.phase)
        apply(scheduler, plan)
    return found


def test_a_new_prompt_in_every_step_does_not_starve_running_requests() -> None:
    scheduler = make()
    scheduler.submit(request(0, 3, limit=4))
    steps = phases(scheduler, lambda step: scheduler.submit(request(step + 1, 10, limit=1)))
    assert steps == ["prefill", "decode"] * 3


def test_a_long_prompt_in_chunks_does_not_starve_running_requests() -> None:
    scheduler = make(budget=5)
    scheduler.submit(request(0, 5, limit=4))
    scheduler.submit(request(1, 100))
    assert phases(scheduler, lambda step: None) == ["prefill", "decode"] * 3


def test_chunks_of_a_prompt_follow_each_other_while_nothing_can_decode() -> None:
    scheduler = make(budget=5)
    scheduler.submit(request(0, 20, limit=1))
    assert phases(scheduler, lambda step: None) == ["prefill"] * 4


def test_only_a_chunk_with_the_newest_token_asks_for_logits() -> None:
    scheduler = make(budget=5)
    scheduler.submit(request(0, 7))
    first = scheduler.schedule()
    assert first is not None and [chunk.reaches_end for chunk in first.chunks] == [False]
    apply(scheduler, first)
    second = scheduler.schedule()
    assert second is not None and [chunk.reaches_end for chunk in second.chunks] == [True]


def test_pages_for_prompt_and_output_are_reserved_at_admission() -> None:
    scheduler = make(pages=6)  # five can be used
    scheduler.submit(request(0, 6, limit=3))  # 6 + 3 - 1 tokens: two pages
    scheduler.submit(request(1, 9, limit=1))  # three pages
    scheduler.submit(request(2, 1, limit=1))  # has to wait
    scheduler.schedule()
    assert [len(r.pages) for r in scheduler.running] == [2, 3]
    assert [r.id for r in scheduler.waiting] == [2]
    scheduler.finish(scheduler.running[1], "length")
    scheduler.schedule()
    assert [r.id for r in scheduler.running] == [0, 2]


def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    scheduler = make(pages=6)
    scheduler.submit(request(0, 12, limit=1))
    scheduler.submit(request(1, 12, limit=1))
    scheduler.submit(request(2, 1, limit=1))
    scheduler.schedule()
    assert [r.id for r in scheduler.running] == [0]


def test_no_more_run_than_allowed() -> None:
    scheduler = make(max_running=2)
    for request_id in range(3):
        scheduler.submit(request(request_id, 1))
    scheduler.schedule()
    assert len(scheduler.running) == 2


def test_one_that_could_never_run_is_refused() -> None:
    scheduler = make(pages=3)
    with pytest.raises(CapacityError, match=r"9 tokens .* 8 fit"):
        scheduler.submit(request(0, 5, limit=5))
    assert not scheduler.has_work


def test_dropping_is_harmless_in_every_state() -> None:
    scheduler = make(max_running=1)
    running, waiting = request(0, 5), request(1, 5)
    scheduler.submit(running)
    scheduler.submit(waiting)
    scheduler.schedule()
    for one in (running, waiting, running):
        scheduler.drop(one)
        scheduler.check_integrity()
    assert running.state is waiting.state is RequestState.DROPPED
    assert not scheduler.has_work and running.finish_reason is None


def test_a_finished_request_stays_finished_when_dropped() -> None:
    scheduler = make()
    one = request(0, 1)
    scheduler.submit(one)
    scheduler.schedule()
    scheduler.finish(one, "stop")
    scheduler.drop(one)
    assert one.state is RequestState.FINISHED and one.finish_reason == "stop"


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6), st.booleans()), max_size=12),
    st.integers(8, 20),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_everything_is_computed_once_in_order_and_ends(
    jobs: list[tuple[int, int, bool]], pages: int, max_running: int, budget: int
) -> None:
    allocator = PageAllocator(pages)
    scheduler = Scheduler(
        allocator, page_tokens=PAGE_TOKENS, max_running=max_running, prefill_budget_tokens=budget
    )
    requests = [request(i, prompt, limit) for i, (prompt, limit, _) in enumerate(jobs)]
    for one in requests:
        scheduler.submit(one)
    last = "decode"
    while (plan := scheduler.schedule()) is not None:
        could_decode = any(not one.in_prefill for one in scheduler.running)
        for chunk in plan.chunks:
            assert chunk.start == chunk.request.computed
            assert chunk.start + chunk.count <= len(chunk.request.pages) * PAGE_TOKENS
        assert plan.phase == "decode" or plan.tokens <= budget
        assert plan.phase == "decode" or last == "decode" or not could_decode
        last = plan.phase
        apply(scheduler, plan)
        for one, (_, _, cancel) in zip(requests, jobs, strict=True):
            if cancel and one.generated == 2:
                scheduler.drop(one)
        scheduler.check_integrity()
    assert all(not one.is_live for one in requests)
    assert allocator.used == 0
