"""Whatever a model prefers, an answer under a constraint matches it; whatever a client asks, it costs little or is refused."""

from __future__ import annotations

import contextlib
import json
import random
import re
import string
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxml.errors import MissingExtraError, RequestError
from jaxml.infer import constraints
from jaxml.infer.constraints import (
    WHITESPACE,
    ConstraintError,
    ConstraintLimits,
    Matcher,
    Vocabulary,
    compile_constraint,
)
from jaxml.infer.request import Constraint
from jaxml.infer.text import TextStream
from jaxml.inputs.spec import BpeTokenizerSpec
from jaxml.inputs.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, build_tokenizer
from tests.infer.test_text import sentencepiece
from tests.infer.written_schemas import random_schema

MAX_TOKENS = 400
EXAMPLES = [
    '{"name": "Ada", "age": 36, "tags": ["a", "b"], "on": true, "x": null, "id": -1.5e3}',
    "true false 2024-01-31",
]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "characters":
        return CharTokenizer("".join(sorted(set(string.printable + "éß😀"))))
    if kind == "subword":
        return build_tokenizer(BpeTokenizerSpec(290), EXAMPLES * 20)
    return sentencepiece()


@cache
def vocabulary_of(kind: str) -> Vocabulary:
    return Vocabulary.of(tokenizer_of(kind))


KINDS = ["bytes", "characters", "subword", "sentencepiece"]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def allowed(matcher: Matcher, vocab_size: int) -> list[int]:
    bits = matcher.mask()
    assert bits.dtype == np.uint32 and bits.shape == (-(-vocab_size // 32),)
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
    assert not flags[vocab_size:].any(), "a token outside the vocabulary"
    return np.flatnonzero(flags).tolist()


def answered(
    constraint: Constraint, kind: str, seed: int = 0, wish: Callable[[str], float] = lambda text: 0.0
) -> tuple[str, str]:
    """(text, finish reason) of a model whose logits are random, plus its wish for what a token writes."""
    tokenizer, vocabulary = tokenizer_of(kind), vocabulary_of(kind)
    matcher = compile_constraint(constraint, vocabulary)
    draws = np.random.default_rng(seed)
    wishes = np.array([wish(tokenizer.decode([token])) for token in range(vocabulary.vocab_size)])
    stream, shown = TextStream(tokenizer, tokenizer.encode("a"), ()), []
    for _ in range(MAX_TOKENS):
        if matcher.is_finished:
            return "".join(shown) + stream.flush(), "stop"
        choices = allowed(matcher, vocabulary.vocab_size)
        ends = set(choices) & set(vocabulary.end_tokens)
        assert bool(ends) == (matcher.is_accepting and bool(vocabulary.end_tokens)), "the end of text has its own rule"
        logits = (draws.gumbel(size=len(wishes)) + wishes)[choices]
        token = choices[int(np.argmax(logits))]
        if token in ends:
            return "".join(shown) + stream.flush(), "stop"
        matcher.advance([token])
        shown.append(stream.push([token]))
    return "".join(shown) + stream.flush(), "length"


def brief(text: str) -> float:
    """What a model likes that comes to an end."""
    return 3.0 if text[:1] in ("", '"', "}", "]") else 0.0


def schema_of(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


def check_answers(seeds: range) -> int:
    """Every answer to a random schema validates, or was cut off; how many came to their end."""
    ended = 0
    for seed in seeds:
        schema = random_schema(random.Random(seed))
        kind = KINDS[seed % len(KINDS)]
        text, reason = answered(schema_of(schema), kind, seed, brief)
        if reason == "stop":
            ended += 1
            value = json.loads(text)
            faults = [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(value)]
            assert not faults, (seed, kind, schema, text, faults)
    return ended


def test_every_answer_to_random_schemas_parses_and_validates_or_was_cut_off() -> None:
    assert check_answers(range(40)) >= 30


@pytest.mark.slow
def test_every_answer_to_a_thousand_random_schemas_parses_and_validates_or_was_cut_off() -> None:
    assert check_answers(range(1000)) >= 800


TEXTS = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), min_size=1, max_size=4, unique=True)


@given(texts=TEXTS, seed=st.integers(0, 99))
@settings(max_examples=40)
def test_a_choice_is_one_of_the_texts(texts: list[str], seed: int) -> None:
    text, reason = answered(Constraint("choice", json.dumps(texts)), "bytes", seed)
    assert reason == "stop" and text in texts


@EVERY_KIND
@pytest.mark.parametrize("pattern", [r"[a-c]{2,5}", r"(yes|no) \d{1,3}", r"-?(0|[1-9]\d{0,4})(\.\d{1,2})?", r"é?x"])
def test_an_answer_matches_a_regular_expression_whole(kind: str, pattern: str) -> None:
    for seed in range(3):
        text, reason = answered(Constraint("regex", pattern), kind, seed)
        assert reason == "stop" and re.fullmatch(pattern, text, re.ASCII), text


@EVERY_KIND
def test_any_json_object_is_an_object(kind: str) -> None:
    text, reason = answered(schema_of({"type": "object"}), kind, 1, brief)
    assert reason == "stop" and isinstance(json.loads(text), dict)


@EVERY_KIND
def test_a_model_that_loves_spaces_must_go_on(kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}}, "required": ["a", "b"]}
    closed = schema | {"additionalProperties": False}
    text, reason = answered(schema_of(closed), kind, 0, lambda token: 50.0 if token and not token.strip() else 0.0)
    assert reason == "stop" and json.loads(text)
    bound = int(WHITESPACE.rpartition(",")[2].rstrip("}"))
    assert max(map(len, re.findall(r"\s+", text))) == bound, "spaces are allowed, up to the bound"


def test_the_end_of_a_text_is_allowed_exactly_where_the_answer_may_end() -> None:
    matcher = compile_constraint(Constraint("choice", '["a", "abc"]'), vocabulary_of("bytes"))
    seen = []
    for byte in b"abc":
        seen.append(256 in allowed(matcher, 257))
        matcher.advance([byte])
    assert seen == [False, True, False]
    assert (matcher.is_finished, allowed(matcher, 257)) == (True, [256])
    matcher.advance([256])
    assert matcher.is_finished


def test_without_a_token_that_ends_a_text_a_finished_answer_allows_none() -> None:
    matcher = compile_constraint(Constraint("choice", '["ab"]'), vocabulary_of("characters"))
    matcher.advance(tokenizer_of("characters").encode("ab"))
    assert matcher.is_finished and not matcher.mask().any()


def test_several_tokens_may_end_a_text_and_the_logits_may_be_wider_than_the_vocabulary() -> None:
    vocabulary = Vocabulary.of(ByteTokenizer(), vocab_size=300, end_tokens=(256, 7))
    matcher = compile_constraint(Constraint("regex", "a+"), vocabulary)
    matcher.advance(b"a")
    assert allowed(matcher, 300) == [7, 97, 256]


def test_a_token_that_the_grammar_does_not_allow_is_an_error_that_stays() -> None:
    matcher = compile_constraint(Constraint("choice", '["secret"]'), vocabulary_of("bytes"))
    for _ in range(2):
        with pytest.raises(ConstraintError) as caught:
            matcher.advance(b"sx")
        assert "secret" not in str(caught.value)
    with pytest.raises(ConstraintError):
        matcher.mask()
    assert not matcher.is_finished


def test_what_the_vocabulary_cannot_write_is_refused_at_the_start_and_an_error_later() -> None:
    vocabulary = Vocabulary.of(CharTokenizer("abc"))
    with pytest.raises(RequestError, match="guided_choice"):
        compile_constraint(Constraint("choice", '["xa"]'), vocabulary)
    matcher = compile_constraint(Constraint("choice", '["axb"]'), vocabulary)
    matcher.advance(vocabulary_ids("a"))
    with pytest.raises(ConstraintError):
        matcher.mask()


def vocabulary_ids(text: str) -> list[int]:
    return CharTokenizer("abc").encode(text)


def test_matchers_of_one_grammar_go_their_own_ways_and_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary.of(ByteTokenizer())
    asked = Constraint("choice", '["ab", "ac"]')
    first = compile_constraint(asked, vocabulary)
    monkeypatch.setattr(constraints, "_grammar", lambda *args: pytest.fail("compiled twice"))
    second = compile_constraint(asked, vocabulary)
    first.advance(b"ab")
    assert first.is_finished and not second.is_finished
    assert allowed(second, 257) == [97]
    assert allowed(compile_constraint(asked, vocabulary), 257) == [97]


def test_a_vocabulary_forgets_the_grammars_that_were_not_asked_for_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "MAX_KEPT", 2)
    vocabulary = Vocabulary.of(ByteTokenizer())
    for text in "aabca":
        compile_constraint(Constraint("regex", text), vocabulary)
    assert [constraint.source for constraint, _ in vocabulary._kept] == ["c", "a"]


def alternatives(number: int, of: int) -> dict[str, Any]:
    """An intersection of unions, which has of ** number members."""

    def union(place: int) -> dict[str, Any]:
        names = [f"p{place}_{index}" for index in range(of)]
        return {"anyOf": [{"type": "object", "properties": {name: {"const": 1}}, "required": [name]} for name in names]}

    return {"allOf": [union(place) for place in range(number)]}


HOSTILE: dict[str, Constraint] = {
    "no JSON": Constraint("json_schema", "{"),
    "deep JSON": Constraint("json_schema", '{"items":' * 3000 + "1" + "}" * 3000),
    "no schema": schema_of([1]),
    "another type": schema_of({"type": "strin"}),
    "itself": schema_of({"$ref": "#"}),
    "itself and more": schema_of({"allOf": [{"$ref": "#"}]}),
    "elsewhere": schema_of({"$ref": "http://127.0.0.1/x.json"}),
    "nowhere": schema_of({"$ref": "#/$defs/x"}),
    "not": schema_of({"not": {"type": "string"}}),
    "nothing": schema_of({"type": "string", "minLength": 3, "maxLength": 2}),
    "no text": schema_of(False),
    "large": schema_of({"enum": ["x" * 100 + str(number) for number in range(700)]}),
    "many values": schema_of({"enum": list(range(5000))}),
    "many properties": schema_of({"properties": {f"p{number}": {} for number in range(600)}}),
    "patterns": schema_of({"allOf": [{"type": "string", "pattern": f"a.{{{number}}}b"} for number in range(40)]}),
    "deep": schema_of(json.loads('{"items":' * 40 + "{}" + "}" * 40)),
    "products": schema_of(alternatives(6, 4)),
    "multiples": schema_of({"type": "integer", "multipleOf": 10**9 + 7}),
    "look-ahead in a pattern": schema_of({"type": "string", "pattern": "(?=a)b"}),
    "options": schema_of({"type": "object", "x-guidance": {"item_separator": ".*"}}),
    "unique keys": schema_of({"type": "object", "minProperties": 3}),
    "surrogate": Constraint("json_schema", '{"const": "\ud800"}'),
    "look-ahead": Constraint("regex", "(?=a)b"),
    "back-reference": Constraint("regex", r"(a)\1"),
    "open": Constraint("regex", "(a"),
    "brackets": Constraint("regex", "(" * 5000 + ")" * 5000),
    "long": Constraint("regex", "a" * 70_000),
    "lone surrogate": Constraint("regex", "\ud800"),
    "no list": Constraint("choice", '"a"'),
    "empty list": Constraint("choice", "[]"),
    "no texts": Constraint("choice", "[1]"),
    "an empty text": Constraint("choice", '["a", ""]'),
    "half a character": Constraint("choice", '["\\ud800"]'),
    "many choices": Constraint("choice", json.dumps([f"{number}" for number in range(2000)])),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_or_too_much_is_refused_by_the_name_of_its_field(name: str) -> None:
    asked = HOSTILE[name]
    with pytest.raises(RequestError) as caught:
        compile_constraint(asked, vocabulary_of("bytes"))
    assert [fault.failed for fault in caught.value.faults] == [constraints.FIELD_OF[asked.kind]]
    assert len(str(caught.value)) < 1000


COSTLY = [
    Constraint("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
    Constraint("regex", "(?:" * 30 + "(a|b|c)?" + "){1,9}" * 30),
    Constraint("regex", "|".join(rf"[\p{{L}}\p{{N}}]{{{number}}}x" for number in range(1, 300))),
    Constraint("regex", "([ab]*a[ab]{18}c)&([ab]*b[ab]{19}c)"),
    schema_of({"type": "string", "pattern": "^(([a-z]{1,50}){1,50}){1,50}$", "minLength": 5, "maxLength": 100_000}),
    schema_of({"type": "array", "minItems": 10**6, "items": {"type": "integer"}}),
    schema_of({"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(500)}}),
]


@pytest.mark.parametrize("number", range(len(COSTLY)))
def test_what_costs_much_is_refused_or_goes_on_or_fails_alone(number: int) -> None:
    with contextlib.suppress(RequestError, ConstraintError):
        text, reason = answered(COSTLY[number], "bytes")
        assert text and reason in ("stop", "length")


@given(source=st.text(max_size=40), kind=st.sampled_from(["json_schema", "regex", "choice"]))
def test_any_source_gives_a_matcher_or_a_request_error(source: str, kind: Any) -> None:
    try:
        matcher = compile_constraint(Constraint(kind, source), vocabulary_of("bytes"))
    except RequestError:
        return
    assert matcher.mask().any()


KEYWORDS = ["type", "items", "properties", "anyOf", "allOf", "$ref", "required", "minItems", "pattern", "enum", "oneOf"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["string", "object", "#", "#/x", "["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3),
    max_leaves=8,
)


@given(schema=JSON)
def test_any_json_as_a_schema_gives_a_matcher_or_a_request_error(schema: Any) -> None:
    try:
        compile_constraint(schema_of(schema), vocabulary_of("bytes"))
    except RequestError:
        return


def test_each_limit_holds_where_it_says() -> None:
    vocabulary = vocabulary_of("bytes")

    def fits(constraint: Constraint, **limits: int) -> bool:
        try:
            compile_constraint(constraint, vocabulary, ConstraintLimits(**limits))
        except RequestError:
            return False
        return True

    for asked, limits, most in (
        (Constraint("regex", "é"), {"source_bytes": 2}, {"source_bytes": 1}),
        (Constraint("regex", "((a))"), {"depth": 2}, {"depth": 1}),
        (schema_of({"items": {"type": "null"}}), {"depth": 3}, {"depth": 2}),
        (Constraint("choice", '["a", "b"]'), {"choices": 2}, {"choices": 1}),
        (Constraint("regex", "[ab]{3}"), {}, {"compile_steps": 1}),
        (schema_of({"type": "object"}), {}, {"grammar_size": 5}),
    ):
        assert fits(asked, **limits) and not fits(asked, **most), (asked, most)


def test_the_library_is_named_when_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"jaxml\[constrain\]"):
        Vocabulary.of(ByteTokenizer())


def test_constraints_need_no_jax() -> None:
    code = "import sys, jaxml.infer.constraints; print([m for m in ('jax', 'llguidance') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
