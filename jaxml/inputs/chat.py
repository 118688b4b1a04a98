"""A conversation to prompt ids, by the model's chat template; what users write never becomes a special token.

Reads `inputs.tokenizers`, `inputs.template_sandbox` (lazily: it needs Jinja) and `errors`; `serve.requests` calls
`encode_chat`.

A template writes special tokens around the messages, and a message may spell out the same ones to forge a turn. So every
character of every message is hidden while the template runs: it is replaced by a code point of the private planes 15 and
16 that stands for it in this conversation alone. Whatever the template does with a message, in the result the hidden
characters are the messages' and all others its own. The prompt is then encoded as a whole, with special tokens only where
all their characters are the template's. Templates also look into messages (`trim`, `'</think>' in content`, `split`):
`HiddenText` answers such questions about what it stands for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxml.config.spec import suggest
from jaxml.errors import DataError, Faults, RequestError, require_extra
from jaxml.inputs.tokenizers import Tokenizer

if TYPE_CHECKING:
    from jaxml.inputs.template_meter import TemplateLimits

ROLES = ("system", "user", "assistant")
HIDDEN = re.compile("[\U000f0000-\U0010fffd]+")


@dataclass(frozen=True)
class Message:
    """One turn of a conversation: who (one of ROLES) says what."""

    role: str
    content: str


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message], limits: TemplateLimits | None = None) -> list[int]:
    """The ids of a prompt that asks for the assistant's next turn, as `tokenizer.chat_template` writes it.

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
    parts = render_chat(tokenizer.chat_template, messages, spelt_out(tokenizer), limits)
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
    template: str, messages: Sequence[Message], names: dict[str, str], limits: TemplateLimits | None = None
) -> list[tuple[str, bool]]:
    """The prompt in parts, joined the whole of it, each with whether the template wrote it (else a message).

    Raises RequestError (see `encode_chat`).
    """
    require_extra("jinja2", "serve")
    from jaxml.inputs.template_meter import TemplateLimits
    from jaxml.inputs.template_sandbox import compile_template

    check_roles(messages)
    curtain = Curtain(template)
    conversation = [
        {"role": message.role, "content": HiddenText(curtain.hide(message.content), curtain)} for message in messages
    ]
    compiled = compile_template(template, limits or TemplateLimits())
    variables = {"messages": conversation, "add_generation_prompt": True, "tools": None, "documents": None}
    rendered = compiled.render(names | variables)
    parts: list[tuple[str, bool]] = []
    done = 0
    for match in HIDDEN.finditer(rendered):
        parts += [(rendered[done : match.start()], True), (curtain.show(match[0]), False)]
        done = match.end()
    return [(text, is_trusted) for text, is_trusted in [*parts, (rendered[done:], True)] if text]


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


class Curtain:
    """A one-to-one map between the characters of one conversation and private code points that `source` does not use."""

    def __init__(self, source: str):
        self._hidden: dict[int, int] = {}
        self._shown: dict[int, int] = {}
        used = set(source)
        self._free = (code for code in range(0xF0000, 0x10FFFE) if code & 0xFFFE != 0xFFFE and chr(code) not in used)

    def hide(self, text: str) -> str:
        """The text behind the curtain, as long as before."""
        for character in sorted(set(text)):
            if ord(character) not in self._hidden:
                code = next(self._free, None)
                if code is None:
                    raise RequestError(
                        "messages",
                        expected=f"at most {len(self._hidden)} different characters",
                        got="more",
                        todo="send less text at once",
                    )
                self._hidden[ord(character)], self._shown[code] = code, ord(character)
        return text.translate(self._hidden)

    def show(self, text: str) -> str:
        """The inverse of `hide`; characters that are not hidden stay."""
        return text.translate(self._shown)

    def plain(self, value: Any) -> Any:
        """A text, or each of a tuple of texts, as it is behind the curtain; anything else as it is."""
        if isinstance(value, tuple):
            return tuple(map(self.plain, value))
        return self.show(value) if isinstance(value, str) else value


def _asked(name: str) -> Any:
    """A method of `str` that answers for the text behind hidden characters."""

    def method(self: HiddenText, *args: Any) -> Any:
        return getattr(self.plain, name)(*map(self.curtain.plain, args))

    return method


class HiddenText(str):
    """Hidden characters, perhaps among others, that answer questions and can be cut as the text behind them.

    Every character keeps its place, and so its origin. What Python or Jinja makes of it in ways that are not here is
    hidden as well, only no longer of this class: `upper` leaves it as it is, and JSON does not escape its quotes.
    """

    __slots__ = ("_plain", "curtain")
    curtain: Curtain
    _plain: str | None

    def __new__(cls, hidden: str, curtain: Curtain) -> HiddenText:
        made = super().__new__(cls, hidden)
        made.curtain, made._plain = curtain, None
        return made

    @property
    def plain(self) -> str:
        """The text behind the hidden characters."""
        if self._plain is None:
            self._plain = self.curtain.show(self)
        return self._plain

    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        return hash(self.plain)

    def __eq__(self, other: object) -> bool:
        return self.plain == self.curtain.plain(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, text: object) -> bool:
        return self.curtain.plain(text) in self.plain

    def __getitem__(self, place: Any) -> HiddenText:
        return HiddenText(super().__getitem__(place), self.curtain)

    def __add__(self, text: str) -> HiddenText:
        return HiddenText(super().__add__(text), self.curtain)

    def __radd__(self, text: str) -> HiddenText:
        return HiddenText(str.__add__(text, self), self.curtain)

    def lstrip(self, characters: Any = None) -> HiddenText:
        return self[len(self) - len(self.plain.lstrip(self.curtain.plain(characters))) :]

    def rstrip(self, characters: Any = None) -> HiddenText:
        return self[: len(self.plain.rstrip(self.curtain.plain(characters)))]

    def strip(self, characters: Any = None) -> HiddenText:
        return self.lstrip(characters).rstrip(characters)

    def removeprefix(self, prefix: str) -> HiddenText:
        return self[len(self) - len(self.plain.removeprefix(self.curtain.plain(prefix))) :]

    def removesuffix(self, suffix: str) -> HiddenText:
        return self[: len(self.plain.removesuffix(self.curtain.plain(suffix)))]

    def split(self, sep: Any = None, maxsplit: Any = -1) -> list[Any]:
        sep = self.curtain.plain(sep)
        return self._cut(self.plain.split(sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: Any = None, maxsplit: Any = -1) -> list[Any]:
        sep = self.curtain.plain(sep)
        return self._cut(self.plain.rsplit(sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[Any]:
        return self._cut(self.plain.splitlines(keepends))

    def partition(self, sep: str, /) -> Any:
        return tuple(self._cut(self.plain.partition(self.curtain.plain(sep))))

    def rpartition(self, sep: str, /) -> Any:
        return tuple(self._cut(self.plain.rpartition(self.curtain.plain(sep))))

    def replace(self, old: str, new: str, count: Any = -1, /) -> HiddenText:
        return HiddenText(str.join(new, self.split(old, count)), self.curtain)

    def _cut(self, pieces: Iterable[str], gap: int = 0) -> list[HiddenText]:
        """These pieces of the plain text, in order and `gap` characters (or white space) apart, where they stand here."""
        found, start = [], 0
        for piece in pieces:
            start = self.plain.index(piece, start)
            found.append(self[start : start + len(piece)])
            start += len(piece) + gap
        return found

    count, find, rfind, index, rindex = map(_asked, ("count", "find", "rfind", "index", "rindex"))
    startswith, endswith, isspace = map(_asked, ("startswith", "endswith", "isspace"))
    isalnum, isalpha, isdecimal, isdigit = map(_asked, ("isalnum", "isalpha", "isdecimal", "isdigit"))
    isnumeric, islower, isupper = map(_asked, ("isnumeric", "islower", "isupper"))
