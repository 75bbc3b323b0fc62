"""Chat templates: Jinja in a sandbox, as transformers runs them, with bounds on time and size.

A template comes with a checkpoint, from whoever made it, so it is not trusted. The sandbox keeps
it away from Python's internals. Loops are timed, output and repeated strings are limited; what
remains possible is wasting some memory through formatting filters.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from freetoken.errors import RequestError
from freetoken.tokenizer.base import Message

_TICK = "_freetoken_tick"
_deadline_s: ContextVar[float] = ContextVar("deadline_s")


@dataclass(frozen=True)
class RenderLimits:
    """What one rendering may use. The defaults are far above what a million-token chat needs."""

    seconds: float = 10.0
    characters: int = 64 * 1024 * 1024


@dataclass(frozen=True)
class ChatTemplate:
    """One template. `tokens` are the named special tokens that it sees (bos_token, eos_token...).

    It is compiled at its first use: a checkpoint whose template is broken still serves plain
    prompts.
    """

    source: str
    tokens: Mapping[str, str]
    limits: RenderLimits = RenderLimits()

    @cached_property
    def _compiled(self) -> Template:
        try:
            return _Sandbox(self.limits).from_string(self.source)
        except (TemplateError, RecursionError) as error:
            raise RequestError(
                f"the checkpoint's chat template does not compile: {error}; expected a Jinja "
                "template as transformers uses them; send a plain prompt, or mend the template"
            ) from error

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
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._compiled
        reset = _deadline_s.set(time.monotonic() + self.limits.seconds)
        try:
            return _collect(template, names, self.limits)
        except Exception as error:  # a template is a program of its own: it can raise anything
            raise RequestError(
                f"the chat template cannot render these messages: {error or type(error).__name__}; "
                "check the roles and contents that this model accepts"
            ) from error
        finally:
            _deadline_s.reset(reset)


def choose_template(named: Mapping[str, str]) -> str | None:
    """Of several named templates the one called "default", or the only one there is."""
    if "default" in named:
        return named["default"]
    return next(iter(named.values())) if len(named) == 1 else None


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, (str, Mapping)) or not messages:
        raise RequestError(
            f"a chat is a non-empty list of messages, found {type(messages).__name__}"
            f"{'' if messages else ' without any'}: expected "
            '[{"role": "user", "content": "..."}]'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"message {index} of the chat has no role: found {message!r}, expected "
                '{"role": "system" | "user" | "assistant" | "tool", "content": "..."}'
            )


def _collect(template: Template, names: Mapping[str, Any], limits: RenderLimits) -> str:
    parts: list[str] = []
    size = 0
    for part in template.generate(names):
        size += len(part)
        if size > limits.characters:
            raise TemplateError(f"its output is longer than {limits.characters} characters")
        parts.append(part)
    return "".join(parts)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it. Every loop and macro checks the deadline."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, limits: RenderLimits) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self._limits = limits
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals[_TICK] = self._tick

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        bodies = [loop.body for loop in tree.find_all(nodes.For)]
        bodies += [macro.body for macro in tree.find_all(nodes.Macro)]
        for body in bodies:
            tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            body.insert(0, nodes.ExprStmt(tick))
        return tree

    def _tick(self) -> None:
        if time.monotonic() > _deadline_s.get():
            raise TemplateError(f"it ran for more than {self._limits.seconds:g} seconds")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses operators whose result would be huge; else as Jinja does."""
        if _result_size(operator, left, right) > self._limits.characters:
            raise TemplateError(
                f"the result of its operator {operator} is longer than "
                f"{self._limits.characters} characters"
            )
        return super().call_binop(context, operator, left, right)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Upper bound of a result's length, where the operands are text, lists or large numbers."""
    if operator == "+" and isinstance(left, (str, list)) and isinstance(right, (str, list)):
        return len(left) + len(right)
    if operator == "%" and isinstance(left, str):
        return sum(int(digits[:18]) for digits in re.findall(r"\d+", left))
    if operator == "*" and isinstance(left, int) and not isinstance(right, (int, float)):
        left, right = right, left
    if operator == "*" and isinstance(left, (str, list, tuple)) and isinstance(right, int):
        return len(left) * max(right, 0)
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits, other = left.bit_length(), right.bit_length()
        return bits * max(right, 0) if operator == "**" else bits + other
    return 0


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks text for training: here only text."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escaping of HTML, as templates expect."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"%[^A-Za-z%]*\d", pattern):
        raise TemplateError("strftime_now takes a short format without field widths")
    return datetime.now().strftime(pattern)
