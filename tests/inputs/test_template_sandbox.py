"""Honest templates render as published; hostile ones end soon, small, and as a RequestError."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxml.errors import RequestError
from jaxml.inputs.template_meter import TemplateLimits
from jaxml.inputs.template_sandbox import compile_template

LOOP = "{% set n = namespace(x=START) %}{% for i in range(80) %}{% set n.x = STEP %}{% endfor %}{{ n.x | length }}"


def render(source: str, limits: TemplateLimits = TemplateLimits(), **variables: object) -> str:
    return compile_template(source, limits).render(variables)


def growing(start: str, step: str) -> str:
    return LOOP.replace("START", start).replace("STEP", step)


def nested(*bodies: str) -> str:
    return "{% for i in range(99999) %}" + "".join(bodies) + "{% endfor %}"


HOSTILE = {
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
    "loops in scoped blocks": nested("{% block b scoped %}", "{% for j in range(9999) %}{% endfor %}{% endblock %}"),
    "loops whose condition is never true": nested("{% for i in range(99999) if false %}{% endfor %}"),
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "loops that recurse": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "repetition": "{{ 'a' * 1000000000 }}",
    "repetition from the right": "{{ 1000000000 * 'a' }}",
    "repetition of a list": "{{ ([0] * 1000000000) | length }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "squares": growing("3", "n.x * n.x"),
    "doubling by ~": growing("'a'", "n.x ~ n.x"),
    "doubling by +": growing("'a'", "n.x + n.x"),
    "doubling a list": growing("[1]", "n.x + n.x"),
    "doubling by join": growing("'a'", "[n.x, n.x] | join"),
    "doubling by the method join": growing("'a'", "''.join([n.x, n.x])"),
    "doubling by replace": growing("'a'", "n.x | replace('a', 'aa')"),
    "doubling by the method replace": growing("'a'", "n.x.replace('a', 'aa')"),
    "doubling by a block": growing("'a'", "n.x").replace("{% set n.x", "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% set y"),
    "doubling by a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + growing("'a'", "f(n.x)"),
    "memory": "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = n.x + ['a' * 1000000] %}{% endfor %}",
    "long joins": "{{ (['a' * 200000] * 200000) | join }}",
    "a list in itself, written": growing("[1]", "[n.x, n.x]").replace("| length", ""),
    "a list in itself, as text": growing("[1]", "[n.x, n.x]").replace("| length", "| string"),
    "a list in itself, as JSON": growing("[1]", "[n.x, n.x]").replace("| length", "| tojson"),
    "wide fields": "{{ '%1000000000d' % 1 }}",
    "wide formats": "{{ '{:>1000000000}'.format(1) }}",
    "wide formats of maps": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "padding": "{{ 'a'.center(1000000000) }}",
    "padding by a filter": "{{ 'a' | center(1000000000) }}",
    "constants": "{% if false %}{{ 'a' * 1000000000 }}{% endif %}{{ ('a' ~ 'b') * 1000000000 }}",
    "indents": "{{ [1] | tojson(indent=1000000000) }}",
    "bytes of numbers": "{{ (5).to_bytes(1000000000, 'big') | length }}",
    "filler text": "{{ lipsum(1000000) }}",
    "powers of ten": "{{ 2.5 | round(1000000000, 'ceil') }}",
    "holding slices": growing("['a' * 1000000, []]", "[n.x[0], [n.x[1], n.x[0][1:]]]"),
    "holding lists": "{% set n = namespace(x=1) %}" + nested("{% set n.x = [n.x, range(99999) | list] %}"),
    "dates": "{{ strftime_now('%Y' * 1000000) }}",
    "nested brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "the interpreter": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the interpreter through a function": "{{ raise_exception.__globals__['x'] }}",
    "the interpreter through a format": "{{ '{0.__class__}'.format(messages) }}",
    "files": "{% include '/etc/passwd' %}",
    "changing the messages": "{{ messages.append(1) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_soon_in_a_request_error(name: str) -> None:
    started = time.process_time()
    with pytest.raises(RequestError, match="chat template") as caught:
        render(HOSTILE[name], TemplateLimits(seconds=0.3), messages=[])
    assert time.process_time() - started < 10
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{%- for x in [1, 2, 3] %}\n  {%- if x == 2 %}{% continue %}{% endif %}\n{{ x }}\n{%- endfor %}", "13"),
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% generation %}{{ 1 + 2 }}{% endgeneration %}", "3"),
        ("{{ {'b': '<é\"', 'a': none} | tojson }}", '{"b": "<é\\"", "a": null}'),
        ("{{ {'b': 1, 'a': [true]} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": [\n    true\n  ],\n  "b": 1\n}'),
        ("{{ absent }}{{ absent is defined }}{{ none }}{{ 1.5 }}{{ true }}", "FalseNone1.5True"),
        ("{{ ['a', 'b'] | join(', ') ~ 1 ~ '-' ~ [3] | first }}{{ '-'.join(['a', 'b']) }}", "a, b1-3a-b"),
        ("{{ 'aXbX' | replace('X', '-', 1) }}{{ 'aXbX'.replace('X', '') }}{{ 'aa'.replace('', '-') }}", "a-bXab-a-a-"),
        (
            "{{ [{'a': 2}, {'a': 1}] | selectattr('a', 'equalto', 1) | list | length }}{{ 7 % 4 }}{{ 2 ** 5 }}",
            "1332",
        ),
        (
            "{{ [3, 1, 2] | sort | join }}{{ ['a', 'b', 'a'] | unique | map('upper') | list | join }}{{ 'ab'[1:] }}",
            "123ABb",
        ),
        (
            "{{ [{'a': 2}, {'a': 1}] | map(attribute='a') | min }}{{ {'b': 1, 'a': 2} | dictsort | first | first }}",
            "1a",
        ),
        ("{% set a, b = (1, [2]) %}{{ a }}{{ b[0] }}{% filter upper %}x{{ a }}{% endfilter %}", "12X1"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m('a') + m('b') }}{{ 'a' | safe }}{{ 3 | string }}", "[a][b]a3"),
        ("{% for a, b in {'k': 'v'}.items() %}{{ a ~ b ~ loop.index ~ loop.last }}{% endfor %}", "kv1True"),
        ("{% if tools %}{{ tools | no_such_filter }}{% endif %}a", "a"),
    ],
)
def test_what_published_templates_use_works(source: str, expected: str) -> None:
    assert render(source) == expected


def test_the_date_is_that_of_today() -> None:
    assert re.fullmatch(r"\d\d [A-Z][a-z]{2} 20\d\d", render("{{ strftime_now('%d %b %Y') }}"))


IN_BLOCKS = "{% for i in 'ab' %}{% block b scoped %}{% for j in 'ab' %}{% endfor %}{% endblock %}{% endfor %}"


@pytest.mark.parametrize(
    ("limits", "fits", "exceeds"),
    [
        (TemplateLimits(template_bytes=6), "aaaaé", "aaaaaé"),
        (TemplateLimits(characters=4), "{{ 'ab' * 2 }}", "{{ 'abc' + 'de' }}"),
        (TemplateLimits(characters=4), "ab{{ 'cd' }}", "abc{{ 'de' }}"),
        (TemplateLimits(characters=4), "{% set x %}abcd{% endset %}", "{% set x %}abcde{% endset %}"),
        (TemplateLimits(characters=4), "{{ ['a', 'b'] | join('--') }}", "{{ ['a', 'b'] | join('---') }}"),
        (TemplateLimits(made=6), "{{ 'abc' }}{{ 'def' }}", "{{ 'abc' }}{{ 'defg' }}"),
        (TemplateLimits(made=6), "{% set x = [1, 2, 3][:3] %}", "{% set x = [1, 2, 3, 4][:3] %}"),
        (
            TemplateLimits(made=6),
            "{% set x = (1, 2, {'a': 3, 'b': 4}) | first %}",
            "{% set x = (1, 2, 3, 4, {'a': 3, 'b': 4}) %}",
        ),
        (
            TemplateLimits(made=6),
            "{% set x %}abc{% endset %}{% set x = 'abc' | list %}",
            "{% set x %}abcdefg{% endset %}",
        ),
        (TemplateLimits(made=3), "{% set x = 'abc' | list %}", "{% set x = 'abcd' | list %}"),
        # The body of the template is a step, and so is each round.
        (
            TemplateLimits(steps=5),
            "{% for i in 'abcd' %}{% endfor %}",
            "{% for i in 'abcde' %}{% endfor %}",
        ),
        # Two rounds, two blocks, and the rounds in them.
        (TemplateLimits(steps=9), IN_BLOCKS, IN_BLOCKS.replace("in 'ab' %}{% endfor", "in 'abc' %}{% endfor")),
    ],
)
def test_each_limit_holds_where_it_says(limits: TemplateLimits, fits: str, exceeds: str) -> None:
    render(fits, limits)
    with pytest.raises(RequestError, match="more than"):
        render(exceeds, limits)


def test_formatting_is_refused_before_it_makes_anything() -> None:
    with pytest.raises(RequestError, match="formatting with % has no bound"):
        render("{{ '%1000000000d' % 1 }}")


def test_what_a_named_block_writes_is_measured_before_it_is_joined() -> None:
    block = "{% if false %}{% block b %}{% for i in 'abc' %}aa{% endfor %}{% endblock %}{% endif %}{{ self.b() }}"
    assert render(block) == "aaaaaa"
    with pytest.raises(RequestError, match="a text of more than 5 characters"):
        render(block, TemplateLimits(characters=5))


def test_time_is_limited() -> None:
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    started = time.monotonic()
    with pytest.raises(RequestError, match=r"more than 0\.1 s"):
        render(endless, TemplateLimits(steps=2**60, seconds=0.1))
    assert time.monotonic() - started < 10


def test_a_source_that_is_no_template_is_refused_with_its_line() -> None:
    for source in ("{% if %}", "{{ a", "{% endfor %}", "{{ 1 | no_such_filter }}"):
        with pytest.raises(RequestError, match=r"(?i)(template|filter|expected|tag)"):
            compile_template(source)


def test_each_rendering_counts_for_itself_in_threads_too() -> None:
    template = compile_template("{% for i in range(4) %}{{ x }}{% endfor %}", TemplateLimits(steps=10))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda x: template.render({"x": x}), range(50))) == [str(x) * 4 for x in range(50)]
