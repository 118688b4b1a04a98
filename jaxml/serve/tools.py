"""The tools that a conversation may use, and the calls of them in it: read, bounded, and handed to the chat template.

Reads `serve.fields`, `serve.served` and `inputs.chat`; `serve.requests` and `serve.prompts` call it. The model's answer is
its text: calls that it writes, in the form it has learnt, are the client's to read.
"""

from __future__ import annotations

import json
import re
from typing import Any

from jaxml.inputs.chat import ToolCall
from jaxml.serve.fields import Fields, shown
from jaxml.serve.served import Limits

TOOL_FIELDS = ["tools", "tool_choice"]
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NAME = "1 to 64 letters, digits, dots, underscores or hyphens"


def read_tools(fields: Fields, limits: Limits) -> list[dict[str, Any]] | None:
    """What the template shows as tools: none where tool_choice says "none". Faults are noted."""
    choice = fields.values.get("tool_choice")
    if choice is not None and choice not in ("none", "auto"):
        fields.wrong("tool_choice", '"none" or "auto": this server cannot make a model call a tool', "leave it out")
    value = fields.values.get("tools")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > limits.tools:
        return fields.wrong("tools", f"a list of at most {limits.tools} tools")
    before = len(fields.faults.found)
    for index, tool in enumerate(value):
        _check_tool(fields, f"tools[{index}]", tool, limits)
    is_right = len(fields.faults.found) == before
    return value if is_right and value and choice != "none" else None


def _check_tool(fields: Fields, name: str, tool: Any, limits: Limits) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(function, dict):
        fields.wrong(name, 'an object {"type": "function", "function": {...}}', got=shown(tool))
        return
    if nesting(tool, limits.nesting) > limits.nesting:
        fields.wrong(name, f"an object nested at most {limits.nesting} deep", got="a deeper one")
        return
    Fields(tool, fields.faults, f"{name}.").refuse_others(["type", "function"], {})
    inner = Fields(function, fields.faults, f"{name}.function.")
    inner.refuse_others(["name", "description", "parameters", "strict"], {})
    if not isinstance(function.get("name"), str) or not FUNCTION_NAME.fullmatch(function["name"]):
        inner.wrong("name", NAME)
    for key, kind, expected in (("description", str, "text"), ("parameters", dict, "a JSON schema: an object")):
        if function.get(key) is not None and not isinstance(function[key], kind):
            inner.wrong(key, expected)
    inner.boolean("strict")


def read_tool_calls(fields: Fields, limits: Limits) -> tuple[ToolCall, ...]:
    """The calls in an assistant's message, the arguments as the values that their JSON says. Faults are noted."""
    value = fields.values.get("tool_calls")
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > limits.tool_calls:
        fields.wrong("tool_calls", f"a list of at most {limits.tool_calls} calls")
        return ()
    calls = [_tool_call(fields, f"tool_calls[{index}]", item, limits) for index, item in enumerate(value)]
    return tuple(call for call in calls if call is not None)


def _tool_call(fields: Fields, name: str, value: Any, limits: Limits) -> ToolCall | None:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(function, dict):
        return fields.wrong(name, 'an object {"id": "...", "type": "function", "function": {...}}', got=shown(value))
    outer = Fields(value, fields.faults, f"{fields.prefix}{name}.")
    outer.refuse_others(["id", "type", "function"], {"index": (0,)})
    if not isinstance(value.get("id"), str):
        return outer.wrong("id", "text")
    inner = Fields(function, fields.faults, f"{outer.prefix}function.")
    inner.refuse_others(["name", "arguments"], {})
    if not isinstance(function.get("name"), str) or not FUNCTION_NAME.fullmatch(function["name"]):
        return inner.wrong("name", NAME)
    arguments = _arguments(function.get("arguments"), limits)
    if arguments is None:
        return inner.wrong("arguments", f"the JSON text of an object, nested at most {limits.nesting} deep")
    return ToolCall(value["id"], function["name"], arguments)


def _arguments(text: Any, limits: Limits) -> dict[str, Any] | None:
    if not isinstance(text, str):
        return None
    try:
        arguments = json.loads(text or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    is_right = isinstance(arguments, dict) and nesting(arguments, limits.nesting) <= limits.nesting
    return arguments if is_right else None


def nesting(value: Any, most: int) -> int:
    """How deep lists and objects go in a value; no deeper than one more than `most` is looked."""
    level, depth = [value], 0
    while level and depth <= most:
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        depth += bool(inner)
        level = [item for items in inner for item in items]
    return depth


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
