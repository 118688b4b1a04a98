"""Specs are data: frozen dataclasses of numbers, strings, literals, tuples and nested specs, and their tagged JSON.

Reads `errors`; every stage derives its own specs from `Spec`. The JSON of a spec carries its qualified class name under
`"type"`; the loader resolves only frozen dataclasses that derive from `Spec` under `jaxml.*` (format A of the
architecture), so an artifact holds no code and names no code outside this package.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib
import json
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from jaxml.errors import ConfigError, Faults

S = TypeVar("S", bound="Spec")

# A class that moved keeps its old name here, so that old checkpoints open: {"jaxml.old.place.Name": "jaxml.new.place.Name"}.
ALIASES: dict[str, str] = {}


@dataclass(frozen=True)
class Spec:
    """Base of everything that may be written into a checkpoint as configuration.

    A whole number given for a float is made one, so that equal specs have equal digests. Raises ConfigError on NaN and
    infinities, which JSON cannot hold.
    """

    def __post_init__(self) -> None:
        for name in _float_fields(type(self)):
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                where = f"{type(self).__qualname__}.{name}"
                raise ConfigError(
                    where, expected="a finite number", got=str(value), todo="use 0 or None to switch it off"
                )
            floats = tuple(float(number) if type(number) is int else number for number in numbers)
            object.__setattr__(self, name, floats if isinstance(value, tuple) else floats[0])


@dataclass(frozen=True)
class Difference:
    """One leaf in which two specs differ; `path` is dotted, such as `blocks.0.mlp.width`."""

    path: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, got {self.got}"


def to_json(spec: Spec) -> dict[str, Any]:
    """The tagged JSON object of a spec; `from_json` is its inverse."""
    fields = {field.name: _encode(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
    return {"type": f"{type(spec).__module__}.{type(spec).__qualname__}", **fields}


def from_json(value: dict[str, Any]) -> Any:
    """The spec that a tagged JSON object describes. Raises ConfigError with every fault at once."""
    faults = Faults(ConfigError)
    spec = _decode_spec(value, "", faults)
    faults.raise_if_any()
    return spec


def digest(spec: Spec) -> str:
    """sha256 (hex) of the canonical JSON: equal specs have equal digests."""
    return hashlib.sha256(canonical_json(to_json(spec)).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: one text for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def diff(expected: Spec, got: Spec) -> list[Difference]:
    """Leaf by leaf, every difference between two specs (empty when they are equal)."""
    left, right = dict(leaves(expected)), dict(leaves(got))
    paths = list(left) + [path for path in right if path not in left]
    absent = "(absent)"
    return [
        Difference(path, repr(left.get(path, absent)), repr(right.get(path, absent)))
        for path in paths
        if left.get(path, absent) != right.get(path, absent)
    ]


def leaves(spec: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every leaf; a nested spec also yields its class name under `path.type`."""
    if isinstance(spec, Spec):
        yield f"{path}.type".lstrip("."), type(spec).__qualname__
        for field in dataclasses.fields(spec):
            yield from leaves(getattr(spec, field.name), f"{path}.{field.name}".lstrip("."))
    elif isinstance(spec, tuple):
        for index, item in enumerate(spec):
            yield from leaves(item, f"{path}.{index}")
    else:
        yield path, spec


def suggest(name: str, known: list[str]) -> str:
    """`did you mean 'x'?` for the nearest known name, or the list of known names."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else "known here: " + ", ".join(sorted(known))


@functools.cache
def _float_fields(cls: type[Spec]) -> tuple[str, ...]:
    """Fields that hold a float, an optional float, or a tuple of floats."""
    hints = typing.get_type_hints(cls)
    return tuple(
        field.name
        for field in dataclasses.fields(cls)
        if float in (hints[field.name], *typing.get_args(hints[field.name]))
    )


def _encode(value: Any) -> Any:
    if isinstance(value, Spec):
        return to_json(value)
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _resolve(name: str) -> type[Spec] | None:
    name = ALIASES.get(name, name)
    module_name, _, class_name = name.rpartition(".")
    if module_name.partition(".")[0] != "jaxml" or not class_name.isidentifier():
        return None
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError:
        return None
    # An undecorated subclass only inherits the parameters of a dataclass: its own fields would be lost.
    is_own = isinstance(found, type) and issubclass(found, Spec) and "__dataclass_params__" in vars(found)
    return found if is_own and found.__dataclass_params__.frozen else None  # type: ignore[union-attr]


def _decode_spec(value: Any, path: str, faults: Faults) -> Any:
    name = value.get("type") if isinstance(value, dict) else None
    cls = _resolve(name) if isinstance(name, str) else None
    if cls is None:
        faults.add(
            path or "spec",
            expected="a JSON object whose 'type' names a frozen Spec under jaxml",
            got=repr(name) if name is not None else repr(value)[:80],
            todo="open it with the jaxml version that wrote it, or add the moved class to jaxml.config.spec.ALIASES",
        )
        return None
    hints = typing.get_type_hints(cls)
    known = {field.name: field for field in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    before = len(faults.found)
    for key, item in value.items():
        where = f"{path}.{key}".lstrip(".")
        if key == "type":
            continue
        if key not in known:
            faults.add(where, expected=f"a field of {cls.__qualname__}", got=key, todo=suggest(key, list(known)))
        else:
            arguments[key] = _decode(item, hints[key], where, faults)
    for key, field in known.items():
        no_default = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if key not in value and no_default:
            where = f"{path}.{key}".lstrip(".")
            faults.add(where, expected=f"a value of type {hints[key]}", got="nothing", todo=f"add {key!r}")
    return cls(**arguments) if len(faults.found) == before else None


def _decode(value: Any, hint: Any, path: str, faults: Faults) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        if isinstance(value, dict):
            spec = _decode_spec(value, path, faults)
            if spec is None or isinstance(spec, tuple(o for o in options if isinstance(o, type))):
                return spec
        else:
            for option in options:
                trial = Faults(ConfigError)
                decoded = _decode(value, option, path, trial)
                if not trial.found and option is not type(None):
                    return decoded
    elif isinstance(hint, type) and issubclass(hint, Spec):
        spec = _decode_spec(value, path, faults)
        if spec is None or isinstance(spec, hint):
            return spec
    elif origin is tuple and isinstance(value, list):
        item_hint = typing.get_args(hint)[0]
        return tuple(_decode(item, item_hint, f"{path}.{i}", faults) for i, item in enumerate(value))
    elif origin is Literal:
        if value in typing.get_args(hint):
            return value
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint in (int, str, bool) and type(value) is hint:
        return value
    faults.add(path, expected=f"a value of type {hint}", got=repr(value)[:80], todo="correct the value or its type")
    return None
