"""One sequence on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Literal

from freetoken.scheduler.params import SamplingParams

FinishReason = Literal["stop", "length"]


class RequestState(Enum):
    """WAITING -> RUNNING -> FINISHED; either of the first two -> DROPPED (cancelled or failed)."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    DROPPED = "dropped"


class Request:
    """A prompt, what was generated for it, and the pages that hold its keys and values.

    `computed` counts the tokens whose keys and values are in the cache; it trails `tokens`. A
    request that starts with shared pages would start with `computed` above 0.
    """

    def __init__(
        self, request_id: int, prompt: Sequence[int], params: SamplingParams, seed: int, limit: int
    ) -> None:
        """`limit`: tokens to generate at most, already within the context."""
        self.id = request_id
        self.params = params
        self.seed = seed
        self.limit = limit
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self.computed = 0
        self.pages: list[int] = []
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def in_prefill(self) -> bool:
        """The prompt is not in the cache yet."""
        return self.computed < self.prompt_tokens

    @property
    def is_live(self) -> bool:
        return self.state in (RequestState.WAITING, RequestState.RUNNING)

    @property
    def cached_tokens_at_most(self) -> int:
        """Tokens whose keys and values this request may come to need: the last one generated is
        never fed back."""
        return self.prompt_tokens + max(self.limit - 1, 0)
