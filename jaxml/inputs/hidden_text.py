"""Text behind private code points: it keeps its origin through a template, and answers for what it stands for.

Reads `errors`; `inputs.chat` hides what users write with it, `inputs.template_sandbox` asks it for its JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxml.errors import RequestError

HIDDEN = re.compile("[\U000f0000-\U0010fffd]+")


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


def hidden(value: Any, curtain: Curtain) -> Any:
    """A JSON value with every text in it behind the curtain, keys too. As deep as the value is nested."""
    if isinstance(value, str):
        return HiddenText(curtain.hide(value), curtain)
    if isinstance(value, Mapping):
        return {hidden(key, curtain): hidden(item, curtain) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(item, curtain) for item in value]
    return value


def _asked(name: str) -> Any:
    """A method of `str` that answers for the text behind hidden characters."""

    def method(self: HiddenText, *args: Any) -> Any:
        return getattr(self.plain, name)(*map(self.curtain.plain, args))

    return method


class HiddenText(str):
    """Hidden characters, perhaps among others, that answer questions and can be cut as the text behind them.

    Every character keeps its place, and so its origin. What Python or Jinja makes of it in ways that are not here is
    hidden as well, only no longer of this class: `upper` leaves it as it is.
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

    def __lt__(self, other: str) -> bool:
        return self.plain < self.curtain.plain(other)

    def json_escaped(self) -> HiddenText:
        """What stands between the quotes of its JSON; what is hidden stays so. The filter `tojson` asks for it."""
        escaped = (
            (character, json.dumps(self.curtain.show(character), ensure_ascii=False)[1:-1]) for character in self
        )
        return HiddenText("".join(self.curtain.hide(e) if HIDDEN.match(c) else e for c, e in escaped), self.curtain)

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
