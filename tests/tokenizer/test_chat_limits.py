"""Hostile chat templates: each is refused soon, in little memory; ordinary ones are not slower."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import pytest
from jinja2.filters import FILTERS
from transformers.utils.chat_template_utils import render_jinja_template

from freetoken.errors import RequestError
from freetoken.tokenizer.chat import ChatTemplate, RenderLimits

MESSAGES = [{"role": "user", "content": "Why is\nthe sky blue?"}, {"role": "tool", "content": "x"}]
LIMITS = RenderLimits(seconds=0.3, characters=1_000_000, memory=16_000_000)
NEST = "{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
TREE = "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}"
TREE += "{% endfor %}"
BIG = "{% set big = 'x' * 900000 %}"

HOSTILE = {
    "tick replaced": "{% set _freetoken_tick = dict %}" + NEST,
    "environment replaced": "{% set environment = dict %}{% set tick = dict %}" + NEST,
    "macro argument": "{% macro f(environment) %}" + NEST + "{% endmacro %}{{ f(1) }}",
    "loop test": "{% set r = range(99999) %}{% for a in r %}{% for b in r if false %}{% endfor %}"
    "{% endfor %}",
    "blocks": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "concat": "{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}",
    "concat of many": BIG + "{{ (big ~ big) | length }}",
    "macro text": BIG
    + "{% macro f() %}{% for i in range(9999) %}{{ big }}{% endfor %}{% endmacro %}"
    "{{ f() | length }}",
    "set block": BIG + "{% set y %}{{ big }}{{ big }}{% endset %}",
    "filter block": BIG + "{% filter upper %}{{ big }}{{ big }}{% endfilter %}",
    "call block": BIG + "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    "{% call f() %}{{ big }}{% endcall %}",
    "many variables": BIG + "".join(f"{{% set a{i} = big[1:] %}}" for i in range(99)),
    "kept strings": BIG + "{% set ns = namespace(l=[]) %}{% for i in range(99) %}"
    "{% set ns.l = [ns.l, big ~ i] %}{% endfor %}",
    "kept empties": "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = [ns.l, [], [], [], [], {}, {}] %}{% endfor %}",
    "method replace": "{{ ('x' * 9000).replace('x', 'y' * 9000) | length }}",
    "method replace empty": "{{ ('x' * 9000).replace('', 'y' * 9000) | length }}",
    "method join": "{{ ('x' * 9000).join('y' * 9000) | length }}",
    "method center": "{{ 'x'.center(999999999) | length }}",
    "method ljust": "{{ 'x'.ljust(999999999) | length }}",
    "method rjust": "{{ 'x'.rjust(999999999) | length }}",
    "method zfill": "{{ 'x'.zfill(999999999) | length }}",
    "method expandtabs": "{{ '\t'.expandtabs(999999999) | length }}",
    "method translate": "{{ 'x'.translate({120: 'y' * 99999}) | length }}",
    "method encode": "{{ 'x'.encode().center(999999999) | length }}",
    "method split": "{{ ('a ' * 400000).split() | length }}",
    "method splitlines": "{{ ('a\\n' * 400000).splitlines() | length }}",
    "method to_bytes": "{{ (1).to_bytes(999999999, 'big') | length }}",
    "method through attr": "{{ ('x' | attr('center'))(999999999) | length }}",
    "method format": "{{ '{:999999999}'.format('x') | length }}",
    "method format nested": "{{ '{:{}}'.format('x', 999999999) | length }}",
    "method format again": BIG + "{{ '{0}{0}{0}'.format(big) | length }}",
    "method format_map": "{{ '{x:999999999}'.format_map({'x': 1}) | length }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "percent again": BIG + "{{ '%(a)s%(a)s' % {'a': big} }}",
    "filter replace": "{{ ('x' * 9000) | replace('x', 'y' * 9000) | length }}",
    "filter replace named": "{{ ('x' * 9000) | replace(new='y' * 9000, old='x') | length }}",
    "filter join": "{{ range(9999) | join('y' * 9000) | length }}",
    "filter indent": "{{ ('x\\n' * 9000) | indent(9000) | length }}",
    "filter indent constant": "{{ 'x\\nx' | indent(999999999) }}",
    "filter format": "{{ '%999999999d' | format(1) | length }}",
    "filter round": "{{ 1 | round(-999999999) }}",
    "filter round ceil": "{{ 1 | round(999999999, 'ceil') }}",
    "filter list": BIG + "{{ big | list | length }}",
    "filter title": BIG + "{{ big | title | length }}",
    "filter sum": "{{ ([[1]] * 50000) | sum(start=[]) | length }}",
    "filter int": BIG + "{{ ('9' * 900000) | int }}",
    "filter center": "{{ 'x' | center(999999999) | length }}",
    "filter through map": "{{ ['x'] | map('center', 999999999) | list | length }}",
    "lazy chain": "{{ range(99999)" + " | select" * 40 + " | list | length }}" + NEST,
    "too long a lazy chain": "{{ messages" + " | select" * 99 + " | list }}",
    "lipsum": "{{ lipsum(n=99999) | length }}",
    "star of a string": BIG + "{{ cycler(*big) }}",
    "tree printed": TREE + "{{ ns.l }}",
    "tree as text": TREE + "{{ ns.l | string | length }}",
    "tree as JSON": TREE + "{{ ns.l | tojson | length }}",
    "tree compared": TREE + "{{ ns.l == [ns.l[0], ns.l[1]] }}",
    "namespaces printed": "{% set a = namespace(n=1) %}{% set ns = namespace(l=a) %}"
    "{% for i in range(60) %}{% set ns.l = namespace(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l }}"
    + NEST,
    "views printed": "{% set d = {'a': 'x' * 900} %}{{ [d.items()] * 9999 }}",
    "nested for hash": "{% set ns = namespace(t=()) %}{% for i in range(99999) %}"
    "{% set ns.t = (ns.t,) %}{% endfor %}{{ {ns.t: 1} }}",
    "strings compared": BIG + "{% set a = [big ~ 'a'] * 9999 %}{% set b = [big ~ 'a'] * 9999 %}"
    "{{ a == b }}",
    "many comparisons": BIG + "{% set c = big ~ '' %}{{ [" + "big==c," * 9000 + "] }}" + NEST,
    "colliding keys": "{% set r = range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) %}"
    "{{ r | unique | list | length }}",
    "JSON indent": "{{ [1] | tojson(indent=999999999) }}",
    "JSON separators": "{{ range(9999) | list | tojson(separators=('y' * 9000, ':')) | length }}",
    "big numbers": "{% set ns = namespace(n=3) %}{% for i in range(99) %}"
    "{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n % 7 }}",
    "negative power": "{{ 3 ** -999999999999 }}{{ 3 ** 999999999999 }}",
    "autoescape": "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "changed messages": "{{ dict.update(messages[0], {'role': 'system'}) }}",
    "long source": "x" * 200_000,
    "deep source": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}
COMPILED = {
    "outputs": "{{a}}" * 24_000,
    "sets": "".join(f"{{%set v{i}=1%}}" for i in range(7_000)),
    "ifs": "".join(f"{{%if v{i}%}}{{%endif%}}" for i in range(5_000)),
    "list": "{{[" + "a==b," * 20_000 + "]}}",
    "tags": "{%" * 60_000,
    "braces": "{#" + "{" * 100_000,
}
ORDINARY = {
    "strings": "{{ messages[0].content.split('\\n')[-1].strip() ~ messages[1].content.upper() }}"
    "{{ 'a-b'.replace('-', '+') }}{{ ', '.join(['a', 'b']) }}{{ '{}:{:>4}'.format('a', 1) }}"
    "{{ 'x'.center(5) }}{{ 'a'.startswith('a') }}{{ 'a b'.split() }}{{ 'x'.rjust(3, '.') }}",
    "filters": "{{ messages | map(attribute='role') | join(', ') }}{{ 'a\nb' | indent(2) }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ 1.26 | round(1) }}{{ '%s!' | format('a') }}{{ 'a' | replace('a', 'b') }}{{ ['b'] | first }}"
    "{{ [3, 1] | sort | last }}{{ {'b': 1} | dictsort }}{{ '<' | e }}{{ [1, 2] | sum }}"
    "{{ ['a', 'b'] | reverse | list }}{{ 'a' is in ['a'] }}{{ [1, 1] | unique | list }}",
    "values": "{{ messages[1:] }}{{ {'a': (1, 2)}.items() | list }}{{ 3 - 1 }}{{ 2 ** 3 }}{{ [] }}"
    "{% for k, v in {'a': 1}.items() if v == 1 %}{{ k }}{{ loop.index }}{% endfor %}"
    "{% set a, b = 1, 2 %}{{ a < b <= 2 }}{{ dict(a=1) }}{{ dict([('a', 1)]) }}{{ 'x' * 3 }}",
    "macros": "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ caller(3) if caller else '' }}"
    "{% endmacro %}{% macro g(a) %}{{ a }}{{ varargs }}{% endmacro %}{{ g(*[1, 2]) }}{{ g(a=2) }}"
    "{% set x %}a{{ g(1) }}{% endset %}{{ x | trim }}{% filter upper %}a{% endfilter %}"
    "{% call(u) f(1) %}{{ u }}{% endcall %}",
}


def render(source: str, limits: RenderLimits = LIMITS) -> str:
    return ChatTemplate(source, {}, limits).render(MESSAGES, True, {})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_soon(name: str):
    started = time.process_time()
    with pytest.raises(RequestError):
        render(HOSTILE[name])
    assert time.process_time() - started < 3
    assert MESSAGES[0]["role"] == "user"


@pytest.mark.parametrize("name", COMPILED)
def test_hostile_sources_compile_or_fail_in_bounded_time(name: str):
    started = time.process_time()
    try:
        render(COMPILED[name], RenderLimits(seconds=1))
    except RequestError as error:
        assert "template" in str(error)
    assert time.process_time() - started < 8


def test_hostile_templates_take_little_memory():
    """All of them, in one process."""
    code = (
        "import json, resource, sys\n"
        "from freetoken.errors import RequestError\n"
        "from freetoken.tokenizer.chat import ChatTemplate, RenderLimits\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "start = peak()\n"
        "for source in json.load(sys.stdin):\n"
        "    try:\n"
        "        ChatTemplate(source, {}, RenderLimits(0.3, 1_000_000, 16_000_000)).render(\n"
        "            [{'role': 'user', 'content': 'x'}], True, {})\n"
        "    except RequestError as error:\n"
        "        assert 'MemoryError' not in str(error)\n"
        "print(peak() - start)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(list(HOSTILE.values())),
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)),
    )
    assert int(found.stdout) < 200  # MiB


def test_a_failure_without_words_is_named_by_its_kind(monkeypatch: pytest.MonkeyPatch):
    def fails() -> None:
        raise KeyError

    with pytest.raises(RequestError, match="cannot render these messages: KeyError; check"):
        ChatTemplate("{{ f() }}", {}).render(MESSAGES, True, {"f": fails})


def test_a_filter_that_is_not_offered_is_named():
    assert "wordwrap" in FILTERS
    with pytest.raises(RequestError, match="does not compile: No filter named 'wordwrap'"):
        render("{{ 'x' | wordwrap }}")


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_templates_render_as_in_transformers(name: str):
    [expected], _ = render_jinja_template(
        [MESSAGES], chat_template=ORDINARY[name], add_generation_prompt=True
    )
    assert render(ORDINARY[name]) == expected


def test_a_million_tokens_render_within_the_limits():
    source = (
        "{% for m in messages %}{% set c = m.content | trim %}{% if '</t>' in c %}"
        "{% set c = c.split('</t>')[-1].lstrip('\\n') %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "</t>" + "word " * 800} for _ in range(1000)]
    assert len(ChatTemplate(source, {}).render(messages, True, {})) > 4_000_000
