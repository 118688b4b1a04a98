"""Random JSON schemas of what `infer.constraints` takes, each of which some value satisfies."""

from __future__ import annotations

import random
import string
from typing import Any


def random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema. `depth`: of further schemas inside."""
    leaves = [_text, _whole, _number, _constant, lambda d: {"type": d.choice(["boolean", "null"])}, _several_types]
    inner = [_object, _array, _union, _reference, _both]
    if depth == 0 or draw.random() < 0.25:
        return draw.choice(leaves)(draw)
    return draw.choice(inner)(draw, depth - 1)


def _name(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_letters + '_ é"\\', k=draw.randint(1, 6)))


def _text(draw: random.Random) -> dict[str, Any]:
    kind = draw.randrange(4)
    if kind == 0:
        return {"type": "string"}
    if kind == 1:
        least = draw.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 5)}
    if kind == 2:
        return {"type": "string", "pattern": draw.choice(["^[a-c]+$", "^a.b$", r"^\d{3}-\d{2}$", "x", "^(yes|no)"])}
    return {"type": "string", "format": draw.choice(["date", "uuid", "ipv4"])}


def _whole(draw: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    low = draw.randint(-200, 200)
    if draw.random() < 0.5:
        schema[draw.choice(["minimum", "exclusiveMinimum"])] = low
    if draw.random() < 0.5:
        schema[draw.choice(["maximum", "exclusiveMaximum"])] = low + draw.randint(12, 300)
    if draw.random() < 0.2:
        schema["multipleOf"] = draw.choice([2, 3, 5])
    return schema


def _number(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + draw.choice([1, 2.5, 100])}


def _constant(draw: random.Random) -> dict[str, Any]:
    values = [1, -2.5, "a", 'q"\\', "é😀\n", None, True, [1, "x"], {"k": [0]}]
    return {"const": draw.choice(values)} if draw.random() < 0.3 else {"enum": draw.sample(values, draw.randint(1, 4))}


def _several_types(draw: random.Random) -> dict[str, Any]:
    return {"type": draw.sample(["string", "integer", "boolean", "null"], 2)}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = sorted({_name(draw) for _ in range(draw.randint(0, 4))})
    schema: dict[str, Any] = {"type": "object", "properties": {name: random_schema(draw, depth) for name in names}}
    if names and draw.random() < 0.8:
        schema["required"] = draw.sample(names, draw.randint(1, len(names)))
    if draw.random() < 0.8:
        schema["additionalProperties"] = False if draw.random() < 0.8 else random_schema(draw, 0)
    return schema


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": random_schema(draw, depth)}
    if draw.random() < 0.3:
        schema["prefixItems"] = [random_schema(draw, 0) for _ in range(draw.randint(1, 2))]
    least = draw.randint(0, 2)
    return schema | {"minItems": least, "maxItems": least + draw.randint(0, 3)}


def _union(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(draw, depth) for _ in range(draw.randint(1, 3))]}


def _reference(draw: random.Random, depth: int) -> dict[str, Any]:
    """A list or tree of itself, with an end."""
    node = {"type": "object", "properties": {"value": random_schema(draw, 0), "next": {"$ref": "#/$defs/node"}}}
    more = {"required": ["value"], "additionalProperties": False}
    # Only the outermost schema may hold definitions that "#/..." finds.
    return {"$defs": {"node": node | more}, "$ref": "#/$defs/node"} if depth == 2 else random_schema(draw, depth)


def _both(draw: random.Random, depth: int) -> dict[str, Any]:
    parts = []
    for name in ("first", "second"):
        parts.append({"type": "object", "properties": {name: random_schema(draw, depth)}, "required": [name]})
    return {"allOf": parts}
