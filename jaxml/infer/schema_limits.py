"""What a JSON schema may ask of a grammar: faults of form, what would cost too much, and what masks cannot keep.

Reads `errors`; `infer.constraints` calls `check_schema` before the library sees a schema. Pure Python.

The library bounds most of its own work, but not all: telling whether several patterns can hold at once takes twice as
long for each one more, and objects with thousands of properties take seconds. Nor does it refuse every promise that it
cannot keep. Both are counted here, in the schema as it is written (references are not followed).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxml.errors import Fault, RequestError

MAX_NODES = 4096
MAX_PROPERTIES = 512
# Different ones, formats among them: the cost of meeting all at once doubles with each.
MAX_PATTERNS = 12
# Keywords whose value is data, not a schema.
DATA = frozenset({"const", "enum", "default", "examples", "required"})
# Keywords whose value maps names to schemas.
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


@dataclass
class _Count:
    nodes: int = 0
    properties: int = 0


def check_schema(schema: Any, field: str, max_depth: int) -> None:
    """Raises RequestError, named after the request's field, for the first thing in a schema that is too much or no schema."""
    if not isinstance(schema, dict | bool):
        raise RequestError.from_faults([_fault(field, "a JSON schema: an object", type(schema).__name__)])
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise RequestError.from_faults([_fault(field, "a schema without options for a library", "x-guidance")])
    patterns: set[str] = set()
    count = _Count()
    for node in _nodes(schema, field, max_depth, count):
        patterns |= {str(node[key]) for key in ("pattern", "format") if key in node}
        patterns |= set(_mapping(node, "patternProperties"))
        count.properties += len(_mapping(node, "properties"))
        _check_object(node, field)
    for name, number, most in (
        ("properties", count.properties, MAX_PROPERTIES),
        ("different patterns and formats", len(patterns), MAX_PATTERNS),
    ):
        if number > most:
            raise RequestError.from_faults([_fault(field, f"at most {most} {name} in a schema", str(number))])


def _nodes(schema: Any, field: str, max_depth: int, count: _Count) -> Iterator[dict[str, Any]]:
    """Every object in a schema that is a schema itself. Counts values of all kinds, and bounds their number and depth."""
    waiting: list[tuple[Any, int, bool]] = [(schema, 1, True)]
    while waiting:
        value, depth, is_schema = waiting.pop()
        count.nodes += 1
        if count.nodes > MAX_NODES or depth > max_depth:
            expected = f"a schema of at most {MAX_NODES} values, nested at most {max_depth} deep"
            raise RequestError.from_faults([_fault(field, expected, "more")])
        if isinstance(value, list):
            waiting += [(item, depth + 1, is_schema) for item in value]
        elif isinstance(value, dict):
            if is_schema:
                yield value
            for key, item in value.items():
                if is_schema and key in NAMED and isinstance(item, dict):
                    count.nodes += len(item)
                    waiting += [(inner, depth + 1, True) for inner in item.values()]
                else:
                    waiting.append((item, depth + 1, is_schema and key not in DATA))


def _check_object(node: dict[str, Any], field: str) -> None:
    """A grammar does not keep keys apart that no schema names, so it cannot count them: one more than the required at most."""
    least = node.get("minProperties", 0)
    required = node.get("required", [])
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least > named + 1:
        raise RequestError.from_faults(
            [_fault(field, "minProperties of at most one more than the required properties", str(least)[:20])]
        )


def _mapping(node: dict[str, Any], key: str) -> dict[str, Any]:
    value = node.get(key)
    return value if isinstance(value, dict) else {}


def _fault(field: str, expected: str, got: str) -> Fault:
    return Fault(field, expected, got, f"simplify or correct {field}")
