"""Our description is true: what it allows is taken or refused by name for a reason it cannot say; what it forbids is refused.

And OpenAI's document, field by field: each one is honoured, or refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxml.errors import RequestError
from jaxml.serve.embeddings import EMBEDDING_FIELDS, parse_embeddings
from jaxml.serve.endpoints import ROUTES
from jaxml.serve.openapi import describe
from jaxml.serve.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    parse_chat,
    parse_completion,
)
from jaxml.serve.token_calls import detokenize, tokenize
from tests.serve.asking import BYTES, HELLO, SUBWORD, model

DOCUMENT = describe()
SERVED = {"bytes": model(BYTES, has_embeddings=True, embedding_size=3), "subword": model(SUBWORD)}
PARSERS: dict[str, Callable[[Any], Any]] = {
    "Completion": lambda body: parse_completion(body, SERVED["bytes"]),
    "Chat": lambda body: parse_chat(body, SERVED["subword"]),
    "Embeddings": lambda body: parse_embeddings(body, SERVED["bytes"]),
    "Tokenize": lambda body: tokenize(body, SERVED["subword"]),
    "Detokenize": lambda body: detokenize(body, SERVED["bytes"]),
}
LEAST: dict[str, dict[str, Any]] = {
    "Completion": {"prompt": "hello"},
    "Chat": {"messages": HELLO},
    "Embeddings": {"input": "hello"},
    "Tokenize": {"prompt": "hello"},
    "Detokenize": {"tokens": [1]},
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
# A value of each field of OpenAI's that is honoured; of the others every value but those that ask for nothing is refused.
HONOURED: dict[str, Any] = {
    "model": "shk",
    "prompt": [1, 2],
    "messages": [{"role": "assistant", "content": "a"}],
    "input": ["a"],
    "echo": True,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"5": 1},
    "logprobs": 2,
    "top_logprobs": 2,
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "n": 2,
    "seed": 5,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.5,
    "user": "someone",
    "response_format": {"type": "json_object"},
    "service_tier": "flex",
    "tools": [TOOL],
    "tool_choice": "none",
    "encoding_format": "base64",
    "dimensions": 3,
}
TOGETHER = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}}


def fits(name: str, body: Any) -> bool:
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    return jsonschema.Draft202012Validator(schema).is_valid(body)


def refused(name: str, body: Any) -> str | None:
    """The field of the first fault; None for what is taken."""
    try:
        PARSERS[name](body)
    except RequestError as error:
        return error.faults[0].failed
    return None


@pytest.mark.parametrize(
    ("published", "name"),
    [
        ("CreateCompletionRequest", "Completion"),
        ("CreateChatCompletionRequest", "Chat"),
        ("CreateEmbeddingRequest", "Embeddings"),
    ],
)
def test_each_field_that_openai_documents_is_honoured_or_refused_by_name(
    published: str, name: str, assets: Path
) -> None:
    schemas = json.loads((assets / "openai-openapi" / "openapi.subset.json").read_text())["components"]["schemas"]

    def properties(schema: dict[str, Any]) -> set[str]:
        schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        return set(schema.get("properties", {})).union(*map(properties, schema.get("allOf", [])))

    documented = properties(schemas[published])
    assert len(documented) >= 5
    for field in documented:
        base = LEAST[name] | TOGETHER.get(field, {})
        if field in HONOURED:
            value = True if (field, name) == ("logprobs", "Chat") else HONOURED[field]
            assert refused(name, base | {field: value}) is None, field
            assert PARSERS[name](base | {field: value}) != PARSERS[name](base) or field in (
                "model",
                "user",
                *unseen(name),
            )
        else:
            for value in ("x", 7, [1], {"x": 1}):
                assert refused(name, base | {field: value}) == field
        assert refused(name, base | {field: object()}) == field or field == "model", "a value of no kind"


def unseen(name: str) -> list[str]:
    """Fields whose effect is not in the call: SUBWORD's template shows no tools, and a size says only what is."""
    return {"Chat": ["tools", "tool_choice"], "Embeddings": ["dimensions"]}.get(name, [])


def test_every_path_and_every_field_is_described() -> None:
    assert set(DOCUMENT["paths"]) == set(ROUTES)
    assert all(ROUTES[path].lower() in methods for path, methods in DOCUMENT["paths"].items())
    for name, fields in (("Completion", COMPLETION_FIELDS), ("Chat", CHAT_FIELDS), ("Embeddings", EMBEDDING_FIELDS)):
        assert set(DOCUMENT["components"]["schemas"][name]["properties"]) == set(fields)
    assert not {*REFUSED_IN_COMPLETIONS} & {*COMPLETION_FIELDS} and not {*REFUSED_IN_CHAT} & {*CHAT_FIELDS}
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def edges(schema: dict[str, Any]) -> list[Any]:
    """Values at and just beyond the bounds of a field, and of other kinds."""
    found: list[Any] = ["x", "", 5, 0, -1, 1.5, True, [], ["x"], [""], {}, {"x": 1}, [[]], [None], 10**12, [10**12]]
    for option in schema.get("anyOf", [schema]):
        for bound in ("minimum", "maximum", "exclusiveMinimum"):
            if bound in option:
                found += [option[bound], option[bound] - 1, option[bound] + 1]
        found += option.get("enum", [])
    return found


@pytest.mark.parametrize("name", ["Completion", "Chat", "Embeddings", "Tokenize", "Detokenize"])
def test_no_field_has_a_value_that_is_described_otherwise(name: str) -> None:
    unsaid = {"stop_token_ids", "prompt", "input", "tokens", "model", "dimensions", "guided_regex", "messages"}
    for field, schema in DOCUMENT["components"]["schemas"][name]["properties"].items():
        for value in edges(schema):
            body = LEAST[name] | TOGETHER.get(field, {}) | {field: value}
            if name == "Completion" and field == "max_tokens":
                body["echo"] = True
            if name == "Tokenize" and field == "messages":
                del body["prompt"]
            fault = refused(name, body)
            if not fits(name, body):
                assert fault is not None and fault.startswith(field), (field, value)
            elif field not in unsaid and not (name == "Tokenize" and field in ("tools", "tool_choice")):
                assert fault is None or (field, value) == ("min_tokens", value), (field, value, fault)


def from_schema(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a schema of ours, and now and then of none."""
    if "$ref" in schema:
        return st.deferred(lambda: from_schema(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return st.one_of(*map(from_schema, schema[several]))
    return _of_type(schema)


def _of_type(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    kind = schema["type"]
    if kind == "string":
        most = min(schema.get("maxLength", 12), 12)
        return st.text(st.characters(), min_size=schema.get("minLength", 0), max_size=most)
    if kind == "integer":
        low = schema.get("minimum", 0)
        return st.integers(low, low + 20) | st.integers(low, schema.get("maximum", 2**31))
    if kind == "number":
        return st.floats(schema.get("minimum", 0), schema["maximum"])
    if kind == "array":
        least = schema.get("minItems", 0)
        return st.lists(from_schema(schema["items"]), min_size=least, max_size=least + 3)
    if kind == "object":
        properties = {key: from_schema(value) for key, value in schema.get("properties", {}).items()}
        required = schema.get("required", [])
        if not properties:
            return st.dictionaries(st.text("0123456789a", max_size=3), st.floats(-100, 100), max_size=3)
        optional = {key: value for key, value in properties.items() if key not in required}
        return st.fixed_dictionaries({key: properties[key] for key in required}, optional=optional)
    return st.none() if kind == "null" else st.booleans()


JUNK = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.text(max_size=3), max_size=2)
)


@pytest.mark.parametrize("name", list(PARSERS))
@given(data=st.data())
@settings(max_examples=60)
def test_whatever_the_description_allows_is_taken_or_refused_and_nothing_else_is_raised(
    name: str, data: st.DataObject
) -> None:
    schema = DOCUMENT["components"]["schemas"][name]
    body = data.draw(from_schema({**schema, "required": schema["required"]}))
    if data.draw(st.integers(0, 3)) == 0:
        body[data.draw(st.sampled_from([*schema["properties"], "x"]))] = data.draw(JUNK)
    if refused(name, body) is None:
        assert fits(name, body), "what is taken is described"
