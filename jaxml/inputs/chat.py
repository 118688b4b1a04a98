"""A conversation to prompt ids, by the model's chat template; what users write never becomes a special token.

Reads `inputs.tokenizers`, `inputs.hidden_text`, `inputs.template_sandbox` (lazily: it needs Jinja) and `errors`;
`serve.requests` calls `encode_chat`.

A template writes special tokens around the messages, and a message may spell out the same ones to forge a turn. So every
character of every message is hidden while the template runs: it is replaced by a code point of the private planes 15 and
16 that stands for it in this conversation alone. Whatever the template does with a message, in the result the hidden
characters are the messages' and all others its own. The prompt is then encoded as a whole, with special tokens only where
all their characters are the template's. Templates also look into messages (`trim`, `'</think>' in content`, `split`):
`HiddenText` answers such questions about what it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxml.config.spec import suggest
from jaxml.errors import DataError, Faults, RequestError, require_extra
from jaxml.inputs.hidden_text import HIDDEN, Curtain, hidden
from jaxml.inputs.tokenizers import Tokenizer

if TYPE_CHECKING:
    from jaxml.inputs.template_meter import TemplateLimits

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class ToolCall:
    """A function that the assistant called. arguments: plain values, as JSON can hold them."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation: who (one of ROLES) says what.

    tool_calls: of the assistant. tool_call_id: in the role "tool", the call that this is the result of.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    limits: TemplateLimits | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """The ids of a prompt that asks for the assistant's next turn, as `tokenizer.chat_template` writes it.

    tools: descriptions of functions, as OpenAI has them, for templates that show them (others leave them out).
    No start token is added: the template writes it where the model is used to one. Raises RequestError without a
    template, for a role that is none of ROLES, for what the template refuses, for a conversation beyond the limits, for
    text that the tokenizer cannot write, and when no token comes out.
    """
    if tokenizer.chat_template is None:
        raise RequestError(
            "messages",
            expected="a model with a chat template",
            got="a model that has none",
            todo="ask it for a completion of a prompt, or import it with its chat_template.jinja",
        )
    parts = render_chat(tokenizer.chat_template, messages, spelt_out(tokenizer), limits, tools)
    try:
        ids = tokenizer.encode_marked(parts)
    except DataError as error:
        raise RequestError.from_faults(error.faults) from error
    if not ids:
        raise RequestError(
            "messages",
            expected="at least one token",
            got="a chat template that writes nothing for these messages",
            todo="give a message with text",
        )
    return ids


def spelt_out(tokenizer: Tokenizer) -> dict[str, str]:
    """The tokens that begin and end a text, under the names that templates know them by."""
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    names = tokenizer.special_tokens
    return {variable: names[number] for variable, number in ids.items() if number in names}


def render_chat(
    template: str,
    messages: Sequence[Message],
    names: dict[str, str],
    limits: TemplateLimits | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[tuple[str, bool]]:
    """The prompt in parts, joined the whole of it, each with whether the template wrote it (else a message).

    Raises RequestError (see `encode_chat`).
    """
    require_extra("jinja2", "serve")
    from jaxml.inputs.template_meter import TemplateLimits
    from jaxml.inputs.template_sandbox import compile_template

    check_roles(messages)
    curtain = Curtain(template)
    conversation = [_as_template_reads(message, curtain) for message in messages]
    compiled = compile_template(template, limits or TemplateLimits())
    shown = None if tools is None else [hidden(tool, curtain) for tool in tools]
    variables = {"messages": conversation, "add_generation_prompt": True, "tools": shown, "documents": None}
    rendered = compiled.render(names | variables)
    parts: list[tuple[str, bool]] = []
    done = 0
    for match in HIDDEN.finditer(rendered):
        parts += [(rendered[done : match.start()], True), (curtain.show(match[0]), False)]
        done = match.end()
    return [(text, is_trusted) for text, is_trusted in [*parts, (rendered[done:], True)] if text]


def _as_template_reads(message: Message, curtain: Curtain) -> dict[str, Any]:
    """The message under the names that Hugging Face's templates know."""
    read: dict[str, Any] = {"role": message.role, "content": hidden(message.content, curtain)}
    if message.tool_calls:
        calls = [(call.id, {"name": call.name, "arguments": dict(call.arguments)}) for call in message.tool_calls]
        read["tool_calls"] = [
            {
                "id": hidden(id, curtain),
                "type": "function",
                "function": {k: hidden(v, curtain) for k, v in call.items()},
            }
            for id, call in calls
        ]
    if message.tool_call_id is not None:
        read["tool_call_id"] = hidden(message.tool_call_id, curtain)
    return read


def check_roles(messages: Sequence[Message]) -> None:
    """Raises RequestError for a role that is none of ROLES: templates write roles into their own text."""
    faults = Faults(RequestError)
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            faults.add(
                f"messages[{index}].role",
                expected="one of " + ", ".join(ROLES),
                got=repr(message.role)[:60],
                todo=suggest(message.role[:60], list(ROLES)),
            )
    faults.raise_if_any()
