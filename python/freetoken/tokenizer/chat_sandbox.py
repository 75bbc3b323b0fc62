"""Jinja's sandbox with each operation of a template metered, so that a hostile one ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, FunctionType, MethodDescriptorType, MethodType
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context

from freetoken.tokenizer.chat_meter import (
    Lazy,
    RenderLimits,
    check_filter,
    check_method,
    check_percent,
    check_repeat,
    current_meter,
)

_NODE_BYTES = 64  # what one run of one statement may leave behind besides its values
_FILTERS = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first"),
    *("float", "forceescape", "format", "groupby", "indent", "int", "items", "join", "last"),
    *("length", "list", "lower", "map", "max", "min", "random", "reject", "rejectattr"),
    *("replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum"),
    *("title", "trim", "truncate", "unique", "upper", "wordcount"),
)
_HIDDEN = ("_loop_vars", "_block_vars")  # Jinja's own arguments of a call
_METHODS: dict[type, frozenset[str]] = {
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
}


class _Generator(CodeGenerator):
    """Compiles blocks that check the clock, and values that are charged as they are made."""

    environment: Sandbox

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        current_meter().tick(_NODE_BYTES)
        return super().visit(node, *args, **kwargs)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        body = list(nodes)
        cost = _NODE_BYTES * sum(1 + len(list(node.iter_child_nodes())) for node in body)
        self.writeline(f"environment.tick({cost})")
        super().blockvisit(body, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_values((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._charged(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._charged(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._charged(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._charged(super().visit_Dict, node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self._charged(super().visit_Compare, node, frame)

    def _charged(self, visit: Callable[..., None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it. Compile and run its templates under a started meter.

    It offers the filters, the global functions and the methods of built-in values whose results
    can be bounded; the others raise TemplateError.
    """

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))

    def __init__(self, limits: RenderLimits) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=_checked_output,
        )
        self._limits = limits
        offered: dict[str, Any] = {name: self.filters[name] for name in _FILTERS}
        offered.update(tojson=_tojson, join=_join)
        self.filters = {name: _metered(name, call) for name, call in offered.items()}
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: _metered(name, call, False) for name, call in tests.items()}
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > self._limits.source:
            raise TemplateError(f"it is longer than {self._limits.source} characters")
        tree = super()._parse(source, name, filename)
        if tree.find(nodes.ScopedEvalContextModifier) is not None:
            raise TemplateError("chat templates have no autoescape")
        for loop in tree.find_all(nodes.For):
            if loop.test is not None:
                ticks = nodes.EnvironmentAttribute("tick")
                loop.test = nodes.And(nodes.Call(ticks, [], [], None, None), loop.test)
        calls: Iterable[Any] = tree.find_all((nodes.Call, nodes.Filter, nodes.Test))
        for call in calls:
            if call.dyn_args is not None:
                call.dyn_args = nodes.Filter(call.dyn_args, "list", [], [], None, None)
        tree.set_environment(self)
        return tree

    def tick(self, created: int = 0) -> bool:
        return current_meter().tick(created)

    def made(self, value: Any) -> Any:
        return current_meter().made(value)

    def concat(self, parts: Iterable[str]) -> str:
        return current_meter().concat(parts)

    def join_values(self, values: tuple[Any, ...]) -> str:
        """The operator ~."""
        meter = current_meter()
        meter.reserve(sum(map(meter.weigh, values)))
        return str(meter.made("".join(map(str, values))))

    def getattr(self, obj: Any, attribute: str) -> Any:
        current_meter().tick()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        current_meter().tick()
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses operators whose result would be huge; else as Jinja does."""
        if operator == "%" and isinstance(left, str):
            check_percent(left, right)
        else:
            check_repeat(operator, left, right)
        return current_meter().made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As Jinja does, but for the methods of built-in values that could make huge ones."""
        meter = current_meter()
        named = {name: value for name, value in kwargs.items() if name not in _HIDDEN}
        _check_call(__obj, args, named)
        weight = sum(map(meter.weigh, args)) + sum(map(meter.weigh, named.values()))
        meter.reserve(weight)
        if isinstance(__obj, type):
            meter.tick(16 * weight)
        if __obj is dict or __obj is _Namespace:  # which hash every item
            args = tuple(Lazy(iter(x), x) if isinstance(x, (list, tuple)) else x for x in args)
        return meter.made(super().call(__context, __obj, *args, **kwargs))


class _Namespace(Namespace):
    """Jinja's, printed without its contents: namespaces can contain each other."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_call(target: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    if isinstance(target, FunctionType):  # Jinja wraps str.format
        target = target.__dict__.get("__wrapped__", target)
    if isinstance(target, MethodDescriptorType):
        raise TemplateError(f"chat templates do not call {target.__qualname__}")
    if not isinstance(target, (BuiltinMethodType, MethodType)):
        return
    owner = target.__self__
    if isinstance(owner, str):
        check_method(owner, target.__name__, args, named)
    elif isinstance(target, BuiltinMethodType) and not any(
        isinstance(owner, kind) and target.__name__ in names for kind, names in _METHODS.items()
    ):
        raise TemplateError(f"chat templates do not call {target.__qualname__}")


def _metered(name: str, call: Callable[..., Any], is_filter: bool = True) -> Callable[..., Any]:
    """A filter or test with its result charged, and the value of a filter checked before."""
    first = 1 if hasattr(call, "jinja_pass_arg") else 0

    @wraps(call)
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter = current_meter()
        meter.tick()
        value = args[first]
        if is_filter:
            check_filter(name, value, args[first + 1 :], kwargs)
        result = call(*args, **kwargs)
        return Lazy(result, value) if isinstance(result, Iterator) else meter.made(result)

    return metered


def _checked_output(value: Any) -> Any:
    """What `{{ }}` prints, before it becomes text."""
    meter = current_meter()
    meter.tick()
    if not isinstance(value, str):
        meter.reserve(meter.weigh(value))
    return value


@pass_eval_context
def _join(
    eval_ctx: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    meter = current_meter()
    if isinstance(value, str):
        meter.reserve_entries(len(value))
    if attribute is not None:
        value = map(make_attrgetter(eval_ctx.environment, attribute), value)
    items, between = list(value), str(d)
    meter.reserve(meter.weigh(items) + len(between) * len(items))
    return between.join(map(str, items))


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks text for training: here only text."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escaping of HTML, as templates expect."""
    meter = current_meter()
    meter.reserve(meter.weigh(value))
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > 32 or any(len(part) > 32 for part in separators or ()):
        raise TemplateError("tojson takes indent and separators of at most 32 characters")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return encoder.encode(value) if indent is None else meter.concat(encoder.iterencode(value))


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"%[^A-Za-z%]*\d", pattern):
        raise TemplateError("strftime_now takes a short format without field widths")
    return datetime.now().strftime(pattern)
