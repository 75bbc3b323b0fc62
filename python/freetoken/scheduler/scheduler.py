"""The step scheduler: prefill batches and decode batches, first come, first served."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from freetoken.errors import CapacityError
from freetoken.kvcache import PageAllocator, pages_for
from freetoken.scheduler.request import FinishReason, Request, RequestState


@dataclass(frozen=True)
class Chunk:
    """Compute tokens `start` .. `start + count` of a request."""

    request: Request
    start: int
    count: int

    @property
    def reaches_end(self) -> bool:
        """The chunk ends with the newest token: its logits choose the next one."""
        return self.start + self.count == len(self.request.tokens)


@dataclass(frozen=True)
class StepPlan:
    """One step's chunks: prompts, whole or in part, or one new token each."""

    phase: Literal["prefill", "decode"]
    chunks: tuple[Chunk, ...]

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Owns the waiting and the running requests and their pages.

    Pages for the prompt and everything that may be generated are reserved at admission, so a
    running request never runs out of them and none has to be preempted. Another admission policy
    (reserve less and preempt, or start from shared pages) would replace `_admit` alone.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_tokens: int,
        max_running: int,
        prefill_budget_tokens: int,
    ) -> None:
        self._allocator = allocator
        self._page_tokens = page_tokens
        self._max_running = max_running
        self._prefill_budget_tokens = prefill_budget_tokens
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._last_was_prefill = False

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        return tuple(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. CapacityError if it could not run even alone."""
        needed = self._pages_needed(request)
        if needed > self._allocator.capacity:
            fits = self._allocator.capacity * self._page_tokens
            raise CapacityError(
                f"the request may need {request.cached_tokens_at_most} tokens of key-value cache "
                f"({request.prompt_tokens} of the prompt, up to {request.limit} generated), and "
                f"{fits} fit in memory; shorten the prompt, lower max_tokens or free some memory"
            )
        self._waiting.append(request)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do.

        Prompts come before decoding, so that requests decode together. But a request that can
        decode does so in every second step at least: neither a stream of new prompts nor the chunks
        of a long one hold it up for longer.
        """
        self._admit()
        decoding = self._decode_chunks()
        prefill = () if self._last_was_prefill and decoding else self._prefill_chunks()
        self._last_was_prefill = bool(prefill)
        if prefill:
            return StepPlan("prefill", prefill)
        return StepPlan("decode", decoding) if decoding else None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """A running request is complete: it leaves, its pages are free."""
        self._leave(request, RequestState.FINISHED)
        request.finish_reason = reason

    def drop(self, request: Request) -> None:
        """Cancel a request; nothing happens to one that is finished or dropped already."""
        if request.is_live:
            self._leave(request, RequestState.DROPPED)

    def check_integrity(self) -> None:
        """Raises AssertionError unless pages and requests agree."""
        self._allocator.check_integrity()
        held = [page for request in self._running for page in request.pages]
        if len(held) != len(set(held)):
            raise AssertionError("two running requests hold the same page")
        for request in self._waiting:
            if request.pages or request.state is not RequestState.WAITING:
                raise AssertionError(f"waiting request {request.id} holds pages or has left")
        for request in self._running:
            if request.state is not RequestState.RUNNING:
                raise AssertionError(f"running request {request.id} is {request.state.value}")

    def _pages_needed(self, request: Request) -> int:
        return pages_for(request.cached_tokens_at_most, self._page_tokens)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            needed = self._pages_needed(self._waiting[0])
            if needed > self._allocator.available:
                return
            request = self._waiting.popleft()
            request.pages = self._allocator.allocate(needed)
            request.state = RequestState.RUNNING
            self._running.append(request)

    def _prefill_chunks(self) -> tuple[Chunk, ...]:
        budget = self._prefill_budget_tokens
        chunks = []
        for request in self._running:
            if budget and request.in_prefill:
                count = min(budget, request.prompt_tokens - request.computed)
                chunks.append(Chunk(request, request.computed, count))
                budget -= count
        return tuple(chunks)

    def _decode_chunks(self) -> tuple[Chunk, ...]:
        """One new token of each request whose prompt is in the cache."""
        ready = (request for request in self._running if not request.in_prefill)
        return tuple(Chunk(request, request.computed, 1) for request in ready)

    def _leave(self, request: Request, state: RequestState) -> None:
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._allocator.free(request.pages)
            request.pages = []
        request.state = state
