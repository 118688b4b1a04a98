"""What a template uses up while it is rendered, and the limits of that.

`inputs.template_sandbox` writes calls of these into the code that a template becomes. Needs Jinja (the extra `serve`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2.runtime import Context


@dataclass(frozen=True)
class TemplateLimits:
    """template_bytes: of the source. characters: of the result, and (or items) of every text or list on the way.
    made: characters and items of all that is made on the way together. steps: see above. seconds: of the wall.
    """

    template_bytes: int = 64 * 1024
    characters: int = 2**21
    made: int = 2**24
    steps: int = 500_000
    seconds: float = 2.0


class OverLimit(jinja2.TemplateRuntimeError):
    """A template went beyond a limit."""


class MeteredContext(Context):
    """The state of one rendering, and what it has used up."""

    limits: TemplateLimits
    num_steps = 0
    num_made = 0

    def start(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self.deadline = time.monotonic() + limits.seconds
        self.meter = self

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        """The context of a scoped block, which counts with this one."""
        context: Any = super().derived(locals)
        context.meter = self.meter
        return context

    def spend(self, made: Any = None) -> None:
        """One step, which made a value. Raises OverLimit."""
        self.meter.count(size_of(made))

    def counted(self, made: Any) -> Any:
        """A value that was just made, and a step for it."""
        self.spend(made)
        return made

    def count(self, size: int) -> None:
        self.num_steps += 1
        self.num_made += size
        if size > self.limits.characters:
            raise OverLimit(f"a text or list of more than {self.limits.characters} characters or items")
        if self.num_made > self.limits.made:
            raise OverLimit(f"texts and lists of more than {self.limits.made} characters or items together")
        if self.num_steps > self.limits.steps:
            raise OverLimit(f"more than {self.limits.steps} steps")
        if time.monotonic() > self.deadline:
            raise OverLimit(f"more than {self.limits.seconds:g} s")

    def concatenated(self, values: Iterable[Any]) -> str:
        """`a ~ b`."""
        texts = [text_of(value) for value in values]
        self.meter.count(sum(map(len, texts)))
        return joined_alike("", texts)

    def written_together(self, pieces: Iterable[str]) -> str:
        """What a `{% set x %}` block, a macro or a filter block has written."""
        return self.joined("", pieces)

    def joined(self, separator: str, values: Iterable[Any]) -> str:
        """Text between texts, measured before it is made."""
        texts: list[str] = []
        size = 0
        for value in values:
            texts.append(text_of(value))
            size += len(texts[-1]) + len(separator)
            if size > self.meter.limits.characters + len(separator):
                break
        self.meter.count(size - len(separator) * bool(texts))
        return joined_alike(separator, texts)

    def replaced(self, text: str, old: str, new: str, count: int = -1) -> str:
        """`str.replace`, measured before it is made."""
        times = text.count(old) if count < 0 else min(count, text.count(old))
        self.meter.count(len(text) + times * max(0, len(new) - len(old)))
        return text.replace(old, new, count)


def size_of(value: Any) -> int:
    """Characters or items; 0 for what has no size of its own."""
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def text_of(value: Any) -> str:
    """A value as it is written: text as it is; numbers, nothing and undefined ones as Jinja writes them.

    Lists are refused: one that is nested into itself would be written without end.
    """
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, int | float | jinja2.Undefined):
        return str(value)
    raise TypeError(f"only text and numbers can be written, not {type(value).__name__}; use tojson")


def joined_alike(separator: str, texts: Sequence[str]) -> str:
    """`str.join`, of the class of the texts where one has a class of its own (which its `+` keeps)."""
    other = next((text for text in texts if type(text) is not str), "")
    return other[:0] + separator.join(texts)
