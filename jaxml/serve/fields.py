"""The fields of a JSON object that a client sent, taken by name, type and range.

Reads `errors` and `config.spec` (for suggestions); `serve.requests` uses it. Nothing is converted: "5" is no number, true
is no 1. Each fault is named after the field, as the `param` of an answer in OpenAI's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxml.config.spec import suggest
from jaxml.errors import Fault, Faults, JaxmlError

MAX_INTEGER = 2**31 - 1
# A body may have a thousand wrong fields; nobody reads on after these.
MAX_FAULTS = 20
MAX_SHOWN = 60


def shown(value: Any) -> str:
    """A value as a fault shows it: short, whatever it is."""
    if isinstance(value, str):
        return repr(value[:MAX_SHOWN]) + ("..." if len(value) > MAX_SHOWN else "")
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else repr(value)[:MAX_SHOWN]


def field_name(key: str) -> str:
    """A key as a fault names it: as it is, or escaped and cut where it is strange."""
    return key if key.isascii() and key.isprintable() and len(key) <= MAX_SHOWN else shown(key)


class Fields:
    """The fields of one JSON object. What is null counts as absent; what is wrong is noted and counts as absent too.

    `prefix` is put before each name in a fault, such as "stream_options.".
    """

    def __init__(self, values: Mapping[str, Any], faults: Faults, prefix: str = ""):
        self.values = values
        self.faults = faults
        self.prefix = prefix

    def wrong(self, name: str, expected: str, todo: str = "", got: str = "") -> None:
        """Notes a fault of a field (up to MAX_FAULTS of a request)."""
        if len(self.faults.found) < MAX_FAULTS:
            value = self.values.get(name)
            got = got or ("nothing" if value is None else shown(value))
            self.faults.add(self.prefix + name, expected=expected, got=got, todo=todo or f"correct {field_name(name)}")

    def adopt(self, name: str, error: JaxmlError) -> None:
        """Notes the faults of an error as faults of a field."""
        for fault in error.faults:
            told = fault if fault.failed.startswith(self.prefix + name) else _under(self.prefix + name, fault)
            self.faults.found.append(told)

    def boolean(self, name: str) -> bool | None:
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return value
        return self.wrong(name, "true or false")

    def integer(self, name: str, low: int, high: int = MAX_INTEGER, todo: str = "") -> int | None:
        value = self.values.get(name)
        if value is None or (type(value) is int and low <= value <= high):
            return value
        return self.wrong(name, f"a whole number from {low} to {high}", todo)

    def number(self, name: str, low: float, high: float) -> float | None:
        """Comparisons are written so that NaN fails them."""
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) in (int, float) and low <= value <= high:
            return float(value)
        return self.wrong(name, f"a number from {low:g} to {high:g}")

    def refuse_others(self, known: list[str], refused: Mapping[str, tuple[Any, ...]]) -> None:
        """Notes every field that is not known. Those of `refused` may have a value that changes nothing."""
        for key, value in self.values.items():
            if len(self.faults.found) >= MAX_FAULTS:
                return
            if key in known:
                continue
            if key not in refused:
                todo = f"leave it out; {suggest(key[:MAX_SHOWN], known)}"
                self.wrong(field_name(key), "a field that this server knows", todo, got="one that it does not know")
            elif value is not None and not any(type(value) is type(none) and value == none for none in refused[key]):
                self.wrong(key, "nothing: this server does not offer it", "leave it out")


def _under(name: str, fault: Fault) -> Fault:
    return Fault(name, fault.expected, f"{fault.failed}: {fault.got}", fault.todo)
