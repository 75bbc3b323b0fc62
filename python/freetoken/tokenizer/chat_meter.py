"""What one rendering of a chat template has used, and the bounds that stop it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from string import Formatter
from typing import Any

from jinja2 import TemplateError

_ENTRY = 16  # what one entry of a container weighs, in characters
_KEPT_BYTES = 256  # what the meter keeps of one container
_DEPTH = 200  # nesting of values: deeper ones could overflow the C stack in hash()
_LAZY_DEPTH = 50  # chained lazy filters
_FORMAT = 1024 * 1024  # characters of a format
_NUMBER = 100_000  # characters that are read as a number
_INT_BITS = 16_384  # slow operators on numbers take quadratic time
_WHITESPACE = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
# Their own types: the abstract ones are slow to ask.
_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@dataclass(frozen=True)
class RenderLimits:
    """What one rendering may use. The defaults are far above what a million-token chat needs.

    `characters` bounds the output and every value: a container weighs what its entries weigh,
    each time that they are reachable, plus 16 an entry. `memory` bounds, in bytes, the sum of all
    that the template creates, whether it keeps it or not. `source` bounds the template itself.
    """

    seconds: float = 10.0
    characters: int = 64 * 1024 * 1024
    memory: int = 1024 * 1024 * 1024
    source: int = 128 * 1024


DEFAULT_LIMITS = RenderLimits()


class Meter:
    """Counts for one compilation or rendering. Every method raises TemplateError at a limit."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._deadline_s = time.monotonic() + limits.seconds
        self._free = limits.memory
        self._weights: dict[int, tuple[Any, int, int]] = {}

    def tick(self, created: int = 0) -> bool:
        """Checks the deadline and charges `created` bytes. Always true, for use in conditions."""
        if time.monotonic() > self._deadline_s:
            raise TemplateError(f"it ran for more than {self._limits.seconds:g} seconds")
        self._free -= created
        if self._free < 0:
            raise TemplateError(f"it creates more than {self._limits.memory} bytes")
        return True

    def made(self, value: Any) -> Any:
        """`value`, which an operation has just made, once it is charged and found small enough."""
        self.tick(sys.getsizeof(value))
        if isinstance(value, str):
            self.reserve(len(value))
            return value
        if isinstance(value, int) and value.bit_length() > _INT_BITS:
            raise TemplateError(f"it computes with a number of more than {_INT_BITS} bits")
        self.reserve(self.weigh(value))
        return value

    def reserve(self, characters: int) -> None:
        """Refuses a value of so many characters before it is made."""
        if characters > self._limits.characters:
            raise TemplateError(
                f"one of its values is longer than {self._limits.characters} characters"
            )

    def reserve_entries(self, count: int) -> None:
        """Refuses a list of so many entries before it is made."""
        self.reserve(count * _ENTRY)

    def weigh(self, value: Any) -> int:
        """Characters that `value` stands for, with all that it contains, shared or not."""
        return len(value) if isinstance(value, str) else self._measure(value)[0]

    def _measure(self, value: Any) -> tuple[int, int]:
        """Weight and depth of `value`. Templates cannot change a container, so it is kept."""
        if isinstance(value, (str, bytes)):
            return len(value), 0
        if isinstance(value, _VIEWS):
            return self._measure_entries(tuple(value))
        if not isinstance(value, (dict, list, tuple, set, frozenset)):
            return 1, 0
        known = self._weights.get(id(value))
        if known is None:
            self.tick(_KEPT_BYTES)
            weight, depth = self._measure_entries(value)
            known = self._weights[id(value)] = (value, weight, depth)
        return known[1], known[2]

    def _measure_entries(self, value: Any) -> tuple[int, int]:
        weight, depth = 0, 0
        for part in (value.keys(), value.values()) if isinstance(value, dict) else (value,):
            for entry in part:
                entry_weight, entry_depth = self._measure(entry)
                weight += _ENTRY + entry_weight
                depth = max(depth, entry_depth)
        if depth >= _DEPTH:
            raise TemplateError(f"one of its values nests more than {_DEPTH} deep")
        return weight, depth + 1

    def concat(self, parts: Iterable[str]) -> str:
        """The joined `parts`, as far as they come within the limits."""
        kept: list[str] = []
        size = 0
        for part in parts:
            size += len(part)
            self.tick()
            self.reserve(size)
            kept.append(part)
        text = "".join(kept)
        self.tick(sys.getsizeof(text))
        return text


class Lazy(Iterator[Any]):
    """What a lazy filter yields, each item charged. Raises TemplateError in too long a chain."""

    def __init__(self, items: Iterator[Any], source: Any) -> None:
        self._items = items
        self.depth: int = source.depth + 1 if isinstance(source, Lazy) else 0
        if self.depth > _LAZY_DEPTH:
            raise TemplateError(f"it chains more than {_LAZY_DEPTH} lazy filters")

    def __next__(self) -> Any:
        item = next(self._items)
        current_meter().tick(_ENTRY)
        return item


_meter: ContextVar[Meter] = ContextVar("meter")
current_meter = _meter.get
start_meter = _meter.set
stop_meter = _meter.reset


def check_percent(text: str, values: Any) -> None:
    """Before `text % values`, which repeats each value at most once a directive."""
    meter = current_meter()
    _check_format_length(text)
    if re.search(r"%[^A-Za-z%]*\*", text):
        raise TemplateError("it formats with a width that is itself a value")
    meter.reserve(len(text) + _widths(text) + text.count("%") * meter.weigh(values))


def check_repeat(operator: str, left: Any, right: Any) -> None:
    """Before `left * right` and `left ** right`."""
    meter = current_meter()
    if operator == "*" and isinstance(left, int) and not isinstance(right, (int, float)):
        left, right = right, left
    if operator == "*" and isinstance(left, (str, list, tuple)) and isinstance(right, int):
        weight = meter.weigh(left) if left else 0
        meter.reserve(weight * max(right, 0))
    integers = isinstance(left, int) and isinstance(right, int)
    if operator == "**" and integers and left.bit_length() * abs(right) > _INT_BITS:
        raise TemplateError(f"it computes with a number of more than {_INT_BITS} bits")


def check_filter(name: str, value: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Before a filter that can make more than it was given."""
    arguments = (*args, *named.values())
    if name in ("list", "sort", "title", "wordcount") and isinstance(value, str):
        current_meter().reserve_entries(len(value))
    elif name in ("int", "float") and isinstance(value, str) and len(value) > _NUMBER:
        raise TemplateError(f"it reads a number of more than {_NUMBER} characters")
    elif name == "replace":
        _check_replace(str(value), *args, **named)
    elif name == "format":
        check_percent(str(value), dict(named) or args)
    elif name == "indent":
        _check_indent(str(value), *arguments)
    elif name == "round" and any(isinstance(x, int) and abs(x) > 100 for x in arguments):
        raise TemplateError("it rounds to more than 100 digits")
    elif name == "sum" and not all(isinstance(x, (int, float, str)) for x in arguments):
        raise TemplateError("it sums what are no numbers")


def check_method(text: str, name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Before the method `name` of `text`. Raises TemplateError if templates have no such one."""
    if name not in _STRING_METHODS:
        raise TemplateError(f"chat templates have no str.{name}")
    if name in _CHECKS:
        _CHECKS[name](text, *args, **named)


def _check_format_length(text: str) -> None:
    if len(text) > _FORMAT:
        raise TemplateError(f"one of its formats is longer than {_FORMAT} characters")


def _widths(text: str) -> int:
    return sum(int(digits[0][:18]) for digits in re.finditer(r"\d+", text))


def _check_replace(s: str, old: Any, new: Any, count: Any = None) -> None:
    del count  # only fewer of them
    old, new = str(old), str(new)
    current_meter().reserve(len(s) + s.count(old) * max(len(new) - len(old), 0))


def _check_indent(text: str, *arguments: Any) -> None:
    widths = [len(x) if isinstance(x, str) else int(x) for x in arguments]
    lines = sum(map(text.count, _LINE_BREAKS)) + 2
    current_meter().reserve(len(text) + lines * max(widths, default=4))


def _check_format(text: str, *args: Any, **named: Any) -> None:
    meter = current_meter()
    _check_format_length(text)
    specs = "\n".join(spec for _, _, spec, _ in Formatter().parse(text) if spec)
    if "{" in specs:
        raise TemplateError("it formats with a width that is itself a value")
    weight = meter.weigh((args, named))
    meter.reserve(len(text) + _widths(specs) + text.count("{") * weight)


def _check_join(text: str, items: Any) -> None:
    if not isinstance(items, (str, list, tuple, dict)):
        raise TemplateError("str.join takes a list here")
    meter = current_meter()
    meter.reserve(meter.weigh(items) + len(text) * len(items))


def _check_pad(text: str, width: int, fill: str = " ") -> None:
    current_meter().reserve(width)


def _check_split(text: str, sep: str | None = None, maxsplit: int = -1) -> None:
    meter = current_meter()
    pieces = text.count(sep) if sep else sum(map(text.count, _WHITESPACE))
    pieces = min(pieces, maxsplit) if maxsplit >= 0 else pieces
    meter.reserve_entries(pieces)
    meter.tick(64 * pieces)


def _check_splitlines(text: str, keepends: bool = False) -> None:
    _check_split(text)


_CHECKS: dict[str, Callable[..., None]] = {
    "replace": _check_replace,
    "format": _check_format,
    "join": _check_join,
    "center": _check_pad,
    "ljust": _check_pad,
    "rjust": _check_pad,
    "zfill": _check_pad,
    "split": _check_split,
    "rsplit": _check_split,
    "splitlines": _check_splitlines,
}
_STRING_METHODS = frozenset(_CHECKS) | {
    *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha"),
    *("isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable"),
    *("isspace", "istitle", "isupper", "lower", "lstrip", "partition", "removeprefix"),
    *("removesuffix", "rfind", "rindex", "rpartition", "rstrip", "startswith", "strip"),
    *("swapcase", "title", "upper"),
}
