"""The fields that say what form an answer must have: `response_format`, `guided_regex` and `guided_choice`.

Reads `serve.fields`, `infer.constraints` (its limits), `infer.schema_limits`, `infer.request` and `errors`;
`serve.requests` calls `read_constraint`. Form and size are checked here; the grammar is compiled where the engine is.
"""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

from jaxml.errors import RequestError
from jaxml.infer.constraints import ConstraintLimits
from jaxml.infer.request import Constraint
from jaxml.infer.schema_limits import check_schema
from jaxml.serve.fields import Fields

# vLLM has the last two.
CONSTRAINT_FIELDS = ["response_format", "guided_regex", "guided_choice"]
FORMAT_TYPES = ("text", "json_object", "json_schema")
FORMAT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
ANY_OBJECT = Constraint("json_schema", '{"type":"object"}')
LIMITS = ConstraintLimits()


def read_constraint(fields: Fields) -> Constraint | None:
    """What the answer must match; None for any text. Faults are noted, that of two constraints at once among them."""
    found = {
        "response_format": _format(fields),
        "guided_regex": _regex(fields),
        "guided_choice": _choice(fields),
    }
    asked = {name: constraint for name, constraint in found.items() if constraint is not None}
    if len(asked) > 1:
        fields.wrong(list(asked)[-1], f"nothing beside {next(iter(asked))}", "give one of them")
    for name in asked:
        if importlib.util.find_spec("llguidance") is None:
            fields.wrong(name, "a server with the extra 'constrain'", "leave it out", "one without")
    return next(iter(asked.values()), None)


def _format(fields: Fields) -> Constraint | None:
    value = fields.values.get("response_format")
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in FORMAT_TYPES:
        return fields.wrong("response_format", "an object whose type is one of " + ", ".join(FORMAT_TYPES))
    inner = Fields(value, fields.faults, "response_format.")
    inner.refuse_others(["type", "json_schema"] if kind == "json_schema" else ["type"], {})
    if kind == "json_schema":
        return _json_schema(inner)
    return ANY_OBJECT if kind == "json_object" else None


def _json_schema(fields: Fields) -> Constraint | None:
    value = fields.values.get("json_schema")
    if not isinstance(value, dict):
        return fields.wrong("json_schema", "an object with name and schema")
    inner = Fields(value, fields.faults, f"{fields.prefix}json_schema.")
    inner.refuse_others(["name", "schema", "strict", "description"], {})
    name = value.get("name")
    if not isinstance(name, str) or not FORMAT_NAME.fullmatch(name):
        inner.wrong("name", "1 to 64 letters, digits, underscores or hyphens")
    if value.get("description") is not None and not isinstance(value["description"], str):
        inner.wrong("description", "text")
    inner.boolean("strict")  # an answer matches its schema either way
    schema = value.get("schema")
    if not isinstance(schema, dict):
        return inner.wrong("schema", "a JSON schema: an object")
    try:
        check_schema(schema, f"{inner.prefix}schema", LIMITS.depth)
    except RequestError as error:
        return inner.adopt("schema", error)
    return _sized(inner, "schema", Constraint("json_schema", json.dumps(schema)))


def _regex(fields: Fields) -> Constraint | None:
    value = fields.values.get("guided_regex")
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        return fields.wrong("guided_regex", "a regular expression")
    return _sized(fields, "guided_regex", Constraint("regex", value))


def _choice(fields: Fields) -> Constraint | None:
    value = fields.values.get("guided_choice")
    if value is None:
        return None
    is_right = isinstance(value, list) and all(isinstance(text, str) and text for text in value)
    if not is_right or not 0 < len(value) <= LIMITS.choices:
        return fields.wrong("guided_choice", f"a list of 1 to {LIMITS.choices} texts, none empty")
    return _sized(fields, "guided_choice", Constraint("choice", json.dumps(value)))


def _sized(fields: Fields, name: str, constraint: Constraint) -> Constraint | None:
    size = len(constraint.source.encode("utf-8", "surrogatepass"))
    if size > LIMITS.source_bytes:
        return fields.wrong(name, f"at most {LIMITS.source_bytes} bytes", "shorten it", f"{size}")
    return constraint


def described() -> dict[str, Any]:
    """The schemas of these fields, for `serve.openapi`."""
    name = {"type": "string", "pattern": f"^{FORMAT_NAME.pattern}$"}
    named = {
        "name": name,
        "schema": {"type": "object"},
        "strict": {"type": "boolean"},
        "description": {"type": "string"},
    }
    with_schema = {"type": "object", "properties": named, "required": ["name", "schema"], "additionalProperties": False}
    formats: list[dict[str, Any]] = [
        {"type": "object", "properties": {"type": {"const": kind}}, "required": ["type"], "additionalProperties": False}
        for kind in FORMAT_TYPES[:2]
    ]
    formats.append(
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, "json_schema": with_schema},
            "required": ["type", "json_schema"],
            "additionalProperties": False,
        }
    )
    texts = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": LIMITS.choices}
    return {
        "response_format": {"oneOf": formats},
        "guided_regex": {"type": "string", "minLength": 1},
        "guided_choice": texts,
    }
