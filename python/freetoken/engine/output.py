"""From token ids to the text that a caller sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from freetoken.scheduler.request import FinishReason


class TextDecoder(Protocol):
    """Token ids to text, never half a character."""

    def push(self, token_id: int, /) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True)
class Completion:
    """What was generated for one prompt.

    `token_ids` are all tokens that were generated, an end token or those of a stop string
    included; `text` ends before either. `finish_reason` is "stop" (end token or stop string) or
    "length" (max_tokens or the context limit).
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason


class TextAssembler:
    """Text that is safe to show, token by token.

    What could be the beginning of a stop string is held back until it is known not to be one.
    """

    def __init__(self, decoder: TextDecoder, stop: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stop = stop
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that this token releases; sets `stopped` when a stop string is complete."""
        return self._release(self._decoder.push(token_id))

    def finish(self) -> str:
        """The rest, when nothing more will come."""
        released = self._release(self._decoder.flush())
        if self.stopped:
            return released
        released, self._held = released + self._held, ""
        return released

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
