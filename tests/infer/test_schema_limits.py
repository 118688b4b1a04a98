"""Schemas are bounded where their cost is: values, depth, properties, patterns; each at its limit and one beyond."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.errors import RequestError
from jaxml.infer.schema_limits import MAX_NODES, MAX_PATTERNS, MAX_PROPERTIES, check_schema


def nested(levels: int) -> Any:
    return {"items": nested(levels - 1)} if levels else {}


def with_properties(number: int) -> Any:
    return {"properties": dict.fromkeys(map(str, range(number)), True)}


def with_patterns(number: int) -> Any:
    half = number // 2
    texts = [{"type": "string", "pattern": f"a{index}"} for index in range(half)]
    return {"anyOf": [*texts, {"patternProperties": {f"b{index}": {} for index in range(number - half)}}]}


@pytest.mark.parametrize(
    ("fits", "exceeds"),
    [
        (nested(7), nested(8)),
        (with_patterns(MAX_PATTERNS), with_patterns(MAX_PATTERNS + 1)),
        (with_properties(MAX_PROPERTIES), with_properties(MAX_PROPERTIES + 1)),
        ({"enum": [0] * (MAX_NODES - 2)}, {"enum": [0] * (MAX_NODES - 1)}),
        ({"required": ["a"], "minProperties": 2}, {"required": ["a"], "minProperties": 3}),
        ({"$defs": {"x": {"minProperties": 1}}}, {"$defs": {"x": {"minProperties": 2}}}),
        ({"const": {"x-guidance": 1}}, {"x-guidance": {}}),
        (True, 5),
    ],
)
def test_a_schema_at_a_limit_fits_and_one_beyond_is_refused(fits: Any, exceeds: Any) -> None:
    check_schema(fits, "here", max_depth=8)
    with pytest.raises(RequestError) as caught:
        check_schema(exceeds, "here", max_depth=8)
    assert caught.value.faults[0].failed == "here"


def test_what_a_schema_holds_as_data_or_as_names_is_no_keyword() -> None:
    patterns = {f"p{index}": {"pattern": f"{index}"} for index in range(MAX_PATTERNS + 5)}
    check_schema({"const": patterns, "enum": [patterns], "default": patterns}, "here", 8)
    check_schema({"properties": {"minProperties": {}, "pattern": {}}, "required": ["pattern"]}, "here", 8)
    with pytest.raises(RequestError):
        check_schema({"properties": patterns}, "here", 8)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["properties", "required", "minProperties", "pattern", "const", "a"]), inner)
    ),
    max_leaves=12,
)


@given(schema=JSON)
def test_any_json_fits_or_is_a_request_error(schema: Any) -> None:
    before = json.dumps(schema)
    with contextlib.suppress(RequestError):
        check_schema(schema, "here", 8)
    assert json.dumps(schema) == before
