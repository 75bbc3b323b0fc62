"""Chat templates: Jinja in a sandbox, as transformers runs them, with bounds on time and size.

A template comes with a checkpoint, from whoever made it, so it is not trusted. The sandbox keeps
it away from Python's internals, and a meter stops it: every statement, call, filter and item
checks the clock, every value is charged when it is made, and what can make a large value is
checked before. Not bounded: a single operation of Python (a sort, a search, the compilation of
the Python that Jinja writes) runs to its end, on values within the limits, so a rendering can
exceed its seconds by a few; a refused value may exist for a moment at a few times its limit.
At the default limits the worst templates that we know take about 1 GiB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import Template

from freetoken.errors import RequestError, shown
from freetoken.tokenizer.base import Message
from freetoken.tokenizer.chat_meter import (
    DEFAULT_LIMITS,
    Meter,
    RenderLimits,
    start_meter,
    stop_meter,
)
from freetoken.tokenizer.chat_sandbox import Sandbox
from freetoken.tokenizer.ids import BYTES, bytes_hint

__all__ = ["ChatTemplate", "RenderLimits", "choose_template"]

_EXPECTED = 'expected [{"role": "user", "content": "..."}]'


@dataclass(frozen=True)
class ChatTemplate:
    """One template. `tokens` are the named special tokens that it sees (bos_token, eos_token...).

    It is compiled at its first use: a checkpoint whose template is broken still serves plain
    prompts.
    """

    source: str
    tokens: Mapping[str, str]
    limits: RenderLimits = DEFAULT_LIMITS

    @cached_property
    def _compiled(self) -> Template:
        started = start_meter(Meter(self.limits))
        try:
            return Sandbox(self.limits).from_string(self.source)
        except Exception as error:  # Jinja compiles to Python, which has errors of its own
            raise RequestError(
                f"the checkpoint's chat template does not compile: {_reason(error)}; expected a "
                "Jinja template as transformers uses them; send a plain prompt, or mend the "
                "template"
            ) from error
        finally:
            stop_meter(started)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt of `messages`. Raises RequestError with the template's reason."""
        _check_messages(messages)
        names: dict[str, Any] = {
            **self.tokens,
            "tools": None,
            "documents": None,
            **variables,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._compiled
        meter = Meter(self.limits)
        started = start_meter(meter)
        try:
            return meter.concat(template.generate(names))
        except Exception as error:  # a template is a program of its own: it can raise anything
            raise RequestError(
                f"the chat template cannot render these messages: {_reason(error)}; "
                "check the roles and contents that this model accepts"
            ) from error
        finally:
            stop_meter(started)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def choose_template(named: Mapping[str, str]) -> str | None:
    """Of several named templates the one called "default", or the only one there is."""
    if "default" in named:
        return named["default"]
    return next(iter(named.values())) if len(named) == 1 else None


def _check_messages(messages: Sequence[Message]) -> None:
    """Raises RequestError unless it is a list of messages with roles. What else a message needs
    its template says."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, *BYTES)):
        raise RequestError(f"a chat is a list of messages; found {shown(messages)}, {_EXPECTED}")
    if not messages:
        raise RequestError(f"a chat is a list of messages; found one without any, {_EXPECTED}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"message {index} of the chat has no role: found {shown(message)}, expected "
                '{"role": "system" | "user" | "assistant" | "tool", "content": "..."}'
            )
        content = message.get("content")
        if isinstance(content, BYTES):  # a template would print b'...'
            raise RequestError(
                f"message {index} of the chat has {shown(content)} as its content; expected a text"
                + bytes_hint(content)
            )
