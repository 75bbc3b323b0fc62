"""Chat templates: what transformers renders, and nothing that a template must not do."""

from __future__ import annotations

import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from freetoken.errors import RequestError
from freetoken.tokenizer.chat import ChatTemplate, RenderLimits

MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": "Why is the sky blue?\n"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"é": 1}}]},
]
CHATML = """{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nHello<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}{{ message.content or '' }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
TEMPLATES = {
    "chatml": CHATML,
    "tojson": "{{ messages | tojson }}\n{{ messages | tojson(indent=2) }}",
    "blocks": "  {% if true %}\n  a\n  {% endif %}\nb {# c #}\n",
    "controls": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
    "{% if i > 5 %}{% break %}{% endif %}{{ i }}{{ loop.index0 }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ messages[::-1][0].role }}{{ 'ab' * 3 }}{{ '%s-%s' % ('a', 1) }}",
    "macro": "{% macro show(m) %}[{{ m.role }}]{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}x{{ m.role }}{% endgeneration %}"
    "{% endfor %}",
    "else": "{% for m in [] %}a{% else %}none{% endfor %}{{ tools is none }}{{ missing }}",
}


def render(source: str, limits: RenderLimits | None = None, **variables: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, limits or RenderLimits())
    return template.render(MESSAGES, True, variables)


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_what_transformers_renders(name: str):
    [expected], _ = render_jinja_template(
        [MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=True, bos_token="<s>"
    )
    assert render(TEMPLATES[name]) == expected


def test_names_that_a_template_sees():
    source = "{{ bos_token }}{{ add_generation_prompt }}{{ enable_thinking }}{{ tools[0] }}"
    assert render(source, enable_thinking=False, tools=["t"]) == "<s>TrueFalset"


def test_strftime_now_gives_the_date():
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_the_reason_of_a_refusal_reaches_the_user():
    with pytest.raises(RequestError, match="cannot render these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].role.upper() }}",
        "{{ x.y.z }}",
    ],
)
def test_failures_inside_a_template_are_the_requests(source: str):
    with pytest.raises(RequestError, match=r"cannot render these messages: ."):
        render(source)


def test_a_template_that_does_not_compile_is_named():
    with pytest.raises(RequestError, match=r"does not compile: .*endfor"):
        render("{% for x in messages %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ _freetoken_tick.__self__.loader }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages[0] | attr('__class__') | attr('__base__') }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_cannot_reach_python(source: str):
    """It fails, or what it asked for is undefined and prints as nothing."""
    try:
        text = render(f"<{source}>")
    except RequestError:
        return
    assert text == "<>"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
        "{{ 'x' * 999999999999 }}",
        "{{ 999999999999 * 'x' }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%999999999999d' % 1 }}",
        "{{ strftime_now('%999999999d') }}",
        "{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}",
        "{{ range(999999999) | list | length }}",
    ],
)
def test_endless_and_huge_templates_are_stopped(source: str):
    started = time.monotonic()
    with pytest.raises(RequestError):
        render(source, RenderLimits(seconds=0.2, characters=100_000))
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "without any"),
        ("hi", r"found 'hi' \(str\), expected \[{"),
        (b"hi", r"found b'hi' \(bytes\), expected \[{"),
        (None, r"found None \(NoneType\), expected \[{"),
        (5, r"found 5 \(int\), expected \[{"),
        ({"role": "user"}, r"\(dict\), expected \[{"),
        ([("role", "user")], r"message 0 of the chat has no role: found \('role', 'user'\)"),
        ([{"role": 5, "content": "hi"}], "message 0 of the chat has no role: found {"),
        ([{"role": "user", "content": b"hi"}], r"b'hi' \(bytes\) as its content.*decode"),
        ([{"content": "hi"}], "message 0 of the chat has no role"),
        ([*MESSAGES, "hi"], "message 3 of the chat has no role: found 'hi'"),
    ],
)
def test_what_is_no_chat_is_refused(messages: object, message: str):
    with pytest.raises(RequestError, match=message):
        ChatTemplate("x", {}).render(messages, True, {})
