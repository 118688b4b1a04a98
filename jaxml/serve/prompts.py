"""The prompts of a request: texts, token ids, or the messages of a conversation, to token ids.

Reads `serve.fields`, `serve.served`, `serve.tools`, `infer.text`, `inputs.chat`, `inputs.tokenizers` and `errors`;
`serve.requests`, `serve.embeddings` and `serve.token_calls` call `read_prompts` and `read_messages`. No jax.
"""

from __future__ import annotations

from typing import Any

from jaxml.errors import RequestError
from jaxml.infer.text import encode_prompt
from jaxml.inputs.chat import Message
from jaxml.inputs.tokenizers import Tokenizer
from jaxml.serve.fields import Fields, shown
from jaxml.serve.served import Limits
from jaxml.serve.tools import read_tool_calls

# The role "developer" is what OpenAI calls the system's in newer models; templates know it under its old name.
ROLE_OF = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
REFUSED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
}
# What a message of a role may have besides role and content.
FIELDS_OF_ROLE = {"assistant": ["tool_calls"], "tool": ["tool_call_id"]}


def read_prompts(
    fields: Fields, tokenizer: Tokenizer, max_prompts: int, field: str = "prompt"
) -> list[tuple[str, tuple[int, ...]]]:
    """(name, ids) of each prompt in a field: of one text or one list of ids, or of a list of either kind."""
    value = fields.values.get(field)
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > max_prompts:
            fields.wrong(field, f"at most {max_prompts} of them", "send several requests")
            return []
        kind = type(value[0])
        named = [(f"{field}[{index}]", item if type(item) is kind else None) for index, item in enumerate(value)]
    else:
        named = [(field, value)]
    read = [(name, _ids(fields, name, item, tokenizer)) for name, item in named]
    return [(name, ids) for name, ids in read if ids]


def _ids(fields: Fields, name: str, prompt: Any, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of one prompt; () for one that is wrong, which is noted. An empty one is the start of a text."""
    if isinstance(prompt, list) and prompt:
        if are_ids(prompt, tokenizer):
            return tuple(prompt)
        outside = next(item for item in prompt if not are_ids([item], tokenizer))
        fields.wrong(name, f"token ids from 0 to {tokenizer.vocab_size - 1}", got=f"{shown(outside)} among them")
    elif isinstance(prompt, str | list):
        try:
            return tuple(encode_prompt(tokenizer, prompt if isinstance(prompt, str) else ""))
        except RequestError as error:
            fields.adopt(name, error)
    else:
        expected = "text, a list of token ids, or a list that holds only texts or only lists of token ids"
        fields.wrong(name, expected, got="another kind" if name.endswith("]") else "")
    return ()


def read_messages(fields: Fields, limits: Limits) -> list[Message]:
    """The conversation; [] when anything in it is wrong, which is noted."""
    value = fields.values.get("messages")
    if not isinstance(value, list) or not 0 < len(value) <= limits.messages:
        fields.wrong("messages", f"a list of 1 to {limits.messages} messages")
        return []
    found = [_message(fields, f"messages[{index}]", item, limits) for index, item in enumerate(value)]
    messages = [message for message in found if message is not None]
    return messages if len(messages) == len(found) else []


def _message(fields: Fields, name: str, value: Any, limits: Limits) -> Message | None:
    if not isinstance(value, dict):
        return fields.wrong(name, "an object with role and content", got=shown(value))
    before = len(fields.faults.found)
    inner = Fields(value, fields.faults, f"{name}.")
    role = value.get("role")
    known_role = ROLE_OF.get(role) if isinstance(role, str) else None
    others = {field: ([],) if field == "tool_calls" else () for of in FIELDS_OF_ROLE.values() for field in of}
    known = ["role", "content", *FIELDS_OF_ROLE.get(known_role or "", [])]
    inner.refuse_others(known, {**others, **REFUSED_IN_MESSAGES})
    if known_role is None:
        inner.wrong("role", "one of " + ", ".join(ROLE_OF))
    calls = read_tool_calls(inner, limits) if known_role == "assistant" else ()
    call_id = value.get("tool_call_id") if known_role == "tool" else None
    if known_role == "tool" and not isinstance(call_id, str):
        inner.wrong("tool_call_id", "the id of the call that this is the result of")
    content = "" if calls and value.get("content") is None else _content(inner, limits.content_parts)
    if content is None or known_role is None or len(fields.faults.found) > before:
        return None
    return Message(known_role, content, calls, call_id)


def _content(inner: Fields, max_parts: int) -> str | None:
    """A message's text; parts are joined by line breaks. None for what is wrong, which is noted."""
    value = inner.values.get("content")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not 0 < len(value) <= max_parts:
        return inner.wrong("content", f"text, or a list of 1 to {max_parts} parts of text")
    for index, part in enumerate(value):
        is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text or set(part) != {"type", "text"}:
            kind = shown(part.get("type")) if isinstance(part, dict) else shown(part)
            return inner.wrong(
                f"content[{index}]", 'an object {"type": "text", "text": "..."}', got=f"a part of type {kind}"
            )
    return "\n".join(part["text"] for part in value)


def are_ids(values: list[Any], tokenizer: Tokenizer) -> bool:
    """Whether a list holds only ids of the vocabulary."""
    return all(type(item) is int and 0 <= item < tokenizer.vocab_size for item in values)
