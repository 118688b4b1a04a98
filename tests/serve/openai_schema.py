"""Checks JSON values against schemas of OpenAI's published OpenAPI document: what of JSON Schema those use."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TYPES = {"string": str, "array": list, "object": dict, "boolean": bool, "null": type(None)}


class Schemas:
    """The schemas of the document, by name. Properties that a schema does not name are faults: we invent none."""

    def __init__(self, file: Path):
        self._named = json.loads(file.read_text(encoding="utf-8"))["components"]["schemas"]

    def faults(self, name: str, value: Any, besides: Sequence[str] = ()) -> list[str]:
        """Where a value differs from a schema. besides: patterns of what is known to."""
        found = self._faults({"$ref": f"/{name}"}, value, "")
        return [fault for fault in found if not any(re.search(pattern, fault) for pattern in besides)]

    def _faults(self, schema: dict[str, Any], value: Any, path: str) -> list[str]:
        if value is None and schema.get("nullable"):
            return []
        if "$ref" in schema:
            return self._faults(self._named[schema["$ref"].rpartition("/")[2]], value, path)
        for several in ("anyOf", "oneOf"):
            if several in schema:
                options = [self._faults(option, value, path) for option in schema[several]]
                return min(options, key=len)
        found = self._of_type(schema.get("type"), value, path)
        if not found and "enum" in schema and value not in schema["enum"]:
            found = [f"{path}: {value!r} is none of {schema['enum']}"]
        if not found and isinstance(value, dict):
            found = self._of_object(schema, value, path)
        if not found and isinstance(value, list):
            for index, item in enumerate(value):
                found += self._faults(schema.get("items", {}), item, f"{path}[{index}]")
        return found

    def _of_type(self, kind: str | None, value: Any, path: str) -> list[str]:
        if kind in ("integer", "number"):
            fits = type(value) is int or (kind == "number" and type(value) is float)
        else:
            fits = kind is None or isinstance(value, TYPES[kind])
        return [] if fits else [f"{path}: {value!r} is no {kind}"]

    def _of_object(self, schema: dict[str, Any], value: dict[str, Any], path: str) -> list[str]:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        found = [f"{path}.{key}: missing" for key in schema.get("required", []) if key not in value]
        for key, item in value.items():
            if key in properties or isinstance(others, dict):
                found += self._faults(properties.get(key, others), item, f"{path}.{key}")
            else:
                found.append(f"{path}.{key}: not in the schema")
        return found
