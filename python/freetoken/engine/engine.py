"""The engine: one step is schedule -> run -> sample -> publish."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from freetoken.engine.forward_batch import (
    EVERY_TOKEN,
    LAST_TOKEN,
    NO_TOKEN,
    Span,
    build_batch,
)
from freetoken.engine.interrupts import deferred_interrupts
from freetoken.engine.output import Completion, TextAssembler, TextDecoder
from freetoken.engine.sampling import SamplingRow, sample
from freetoken.errors import CapacityError, FreeTokenError, RequestError
from freetoken.kvcache import KVCache, PageAllocator, pages_for
from freetoken.models.batch import ForwardBatch, Phase
from freetoken.scheduler import (
    Chunk,
    FinishReason,
    Request,
    RequestState,
    SamplingParams,
    Scheduler,
    StepPlan,
)
from freetoken.telemetry import StepTimer


class Model(Protocol):
    """What the engine needs of a decoder."""

    def forward(self, batch: ForwardBatch, kv: KVCache, /) -> Tensor:
        """float32 [R, vocab], one row per entry of `batch.logit_rows`. The next call may write
        over it."""
        ...


class Detokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def stream(self, *, skip_special: bool = True, continuation: bool = False) -> TextDecoder: ...


@dataclass(frozen=True)
class EngineLimits:
    """Sizes that the engine works within."""

    vocab: int
    context_tokens: int
    max_running: int
    prefill_budget_tokens: int


class Generation:
    """One request and the text that came of it so far. Made by `Engine.submit`."""

    def __init__(self, request: Request, assembler: TextAssembler) -> None:
        self.request = request
        self.assembler = assembler
        self._pieces: list[str] = []
        self._taken = 0

    @property
    def done(self) -> bool:
        return self.request.state is RequestState.FINISHED

    def publish(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)

    def take_new_text(self) -> str:
        """Text published since the last call, "" if none."""
        new, self._taken = self._pieces[self._taken :], len(self._pieces)
        return "".join(new)

    def completion(self) -> Completion:
        """The result. FreeTokenError if the request was dropped or still runs."""
        reason = self.request.finish_reason
        if reason is None:
            raise FreeTokenError(
                f"the request is {self.request.state.value}, not finished: it was cancelled, or "
                "an error or Ctrl-C ended the step it was part of; submit it again"
            )
        return Completion(
            text="".join(self._pieces),
            token_ids=self.request.output,
            prompt_tokens=self.request.prompt_tokens,
            completion_tokens=self.request.generated,
            finish_reason=reason,
        )


class Engine:
    """Runs requests over one model and one paged cache. For use by one thread at a time."""

    def __init__(
        self, model: Model, detokenizer: Detokenizer, kv: KVCache, limits: EngineLimits
    ) -> None:
        self._model = model
        self._detokenizer = detokenizer
        self._kv = kv
        self._limits = limits
        self._allocator = PageAllocator(kv.pages)
        self._scheduler = Scheduler(
            self._allocator,
            page_tokens=kv.page_tokens,
            max_running=limits.max_running,
            prefill_budget_tokens=limits.prefill_budget_tokens,
        )
        self._generations: dict[int, Generation] = {}
        self._next_id = 0
        self._in_step = False
        self._cancelled: list[Generation] = []
        # Threads that share a model take turns, step by step; their requests then run together.
        self._turn = threading.RLock()
        self.timer = StepTimer()

    # Requests ------------------------------------------------------------------------------

    def check_prompt(self, token_ids: Sequence[int], new_tokens: int = 1) -> None:
        """RequestError unless the prompt and `new_tokens` more fit the vocabulary and context."""
        if not token_ids:
            raise RequestError("the prompt has no tokens; give at least one")
        vocab, context = self._limits.vocab, self._limits.context_tokens
        for index, token in enumerate(token_ids):
            if not 0 <= token < vocab:
                raise RequestError(
                    f"token {index} of the prompt is {token}; the model's ids are 0 to {vocab - 1}"
                )
        if len(token_ids) + new_tokens > context:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens and the model's context is {context}; "
                f"shorten it to at most {context - new_tokens}"
            )

    def submit(self, token_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Queue a prompt. RequestError or CapacityError, with nothing queued, if it cannot run."""
        wanted = params.max_tokens
        self.check_prompt(token_ids, new_tokens=0 if wanted == 0 else 1)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        with self._turn:
            number = self._next_id
            self._next_id += 1
        request = Request(number, token_ids, params, seed, self._token_limit(token_ids, wanted))
        generation = Generation(
            request, TextAssembler(self._detokenizer.stream(continuation=True), params.stop_strings)
        )
        if request.limit == 0:
            request.state, request.finish_reason = RequestState.FINISHED, "length"
            return generation
        with self._turn:
            self._scheduler.submit(request)
            self._generations[request.id] = generation
        return generation

    def cancel(self, generation: Generation) -> None:
        """Drop a request and free its pages; nothing happens if it has left already.

        Inside a step (a stream collected as garbage) the request leaves when the step is done.
        """
        with self._turn:
            if self._in_step:
                self._cancelled.append(generation)
                return
            self._scheduler.drop(generation.request)
            self._generations.pop(generation.request.id, None)

    def drop_all(self) -> None:
        """Drop every request."""
        self._cancel_each(list(self._generations.values()))

    def _cancel_each(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            self.cancel(generation)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    # One step ------------------------------------------------------------------------------

    def step(self) -> None:
        """Compute one batch. If it fails, every request in the engine is dropped: keys and values
        may be half written. Ctrl-C takes effect after the step."""
        with deferred_interrupts(), self._turn:
            self._in_step = True
            try:
                self._step()
            except BaseException:
                self._cancelled = list(self._generations.values())
                raise
            finally:
                self._in_step = False
                cancelled, self._cancelled = self._cancelled, []
                self._cancel_each(cancelled)

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        if plan is None:
            return
        started = time.perf_counter()
        logits = self._run(plan)
        ending = [chunk.request for chunk in plan.chunks if chunk.reaches_end]
        tokens = sample(logits, [_sampling_row(request) for request in ending]) if ending else []
        self._publish(plan, ending, tokens)
        self._time(plan, time.perf_counter() - started)

    def _run(self, plan: StepPlan) -> Tensor:
        phase = Phase.PREFILL if plan.phase == "prefill" else Phase.DECODE
        spans = [_span(chunk) for chunk in plan.chunks]
        with torch.inference_mode():
            return self._model.forward(build_batch(phase, spans, self._kv.page_tokens), self._kv)

    def _publish(self, plan: StepPlan, ending: Sequence[Request], tokens: Sequence[int]) -> None:
        for chunk in plan.chunks:
            chunk.request.computed += chunk.count
        for request, token in zip(ending, tokens, strict=True):
            self._append(self._generations[request.id], token)

    def _append(self, generation: Generation, token: int) -> None:
        request, assembler = generation.request, generation.assembler
        request.tokens.append(token)
        is_end = token in self._detokenizer.eos_ids and not request.params.ignore_eos
        if not is_end:
            generation.publish(assembler.push(token))
        at_limit = request.generated >= request.limit
        if is_end or at_limit:
            generation.publish(assembler.finish())
        if is_end or at_limit or assembler.stopped:
            reason: FinishReason = "stop" if is_end or assembler.stopped else "length"
            self._scheduler.finish(request, reason)
            del self._generations[request.id]

    def _time(self, plan: StepPlan, seconds: float) -> None:
        add = self.timer.add_prefill if plan.phase == "prefill" else self.timer.add_decode
        add(seconds, plan.tokens)

    def _token_limit(self, token_ids: Sequence[int], wanted: int | None) -> int:
        """Tokens that may be generated: as wanted, at most to the end of the context."""
        room = self._limits.context_tokens - len(token_ids)
        if wanted is not None:
            return min(wanted, room)
        # Without a wish, as many as the cache can hold too; the last one needs no place in it.
        # Of a prompt that is too long by itself the scheduler says so.
        cached = self._allocator.capacity * self._kv.page_tokens
        return min(room, max(1, cached - len(token_ids) + 1))

    # Logits --------------------------------------------------------------------------------

    def score(self, token_ids: Sequence[int], phase: Phase) -> Tensor:
        """Logits after every token, float32 [T, vocab]: in one prefill, or one token at a time
        through the decode path. On the host. Nothing is sampled, and the cache is left as it
        was."""
        self.check_prompt(token_ids, new_tokens=0)
        step = len(token_ids) if phase is Phase.PREFILL else 1
        rows = []
        with deferred_interrupts() as interrupts, self._turn:
            pages = self._scoring_pages(len(token_ids))
            try:
                for start in range(0, len(token_ids), step):
                    span = Span(token_ids[start : start + step], start, pages, EVERY_TOKEN)
                    batch = build_batch(phase, [span], self._kv.page_tokens)
                    with torch.inference_mode():
                        rows.append(self._model.forward(batch, self._kv).clone())
                    interrupts.deliver()
            finally:
                self._allocator.free(pages)
        return torch.cat(rows).cpu()

    def _scoring_pages(self, tokens: int) -> list[int]:
        needed = pages_for(tokens, self._kv.page_tokens)
        if needed > self._allocator.available:
            raise CapacityError(
                f"logits of {tokens} tokens need {needed} key-value pages and "
                f"{self._allocator.available} are free; use fewer tokens, or finish other requests"
            )
        return self._allocator.allocate(needed)

    def check_integrity(self) -> None:
        """Raises AssertionError if pages and requests disagree, or pages are held by nobody."""
        self._scheduler.check_integrity()
        held = sum(len(request.pages) for request in self._scheduler.running)
        if held != self._allocator.used:
            raise AssertionError(f"{self._allocator.used} pages in use, {held} held by requests")


def _span(chunk: Chunk) -> Span:
    request = chunk.request
    tokens = request.tokens[chunk.start : chunk.start + chunk.count]
    logits = LAST_TOKEN if chunk.reaches_end else NO_TOKEN
    return Span(tokens, chunk.start, request.pages, logits)


def _sampling_row(request: Request) -> SamplingRow:
    return SamplingRow(request.params, request.seed, request.generated, request.tokens)
