"""A device without a model: it keeps the tokens themselves in the pages, and the next token is a hash of what it reads there.

So an answer is right exactly when every token lay in the right slot of the right page at the right time. `expected` is the
oracle: the same hash over the text alone. Faults: a token of `POISON` in a text makes its logits not finite, and
`failures` raises at the steps named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxml.infer.request import Request
from jaxml.infer.work import Outcome, Span, share_out

VOCAB = 50
POISON = 49
EOS = 0


def next_token(text: Sequence[int], seed: int) -> int:
    """From 0 to 48, a function of all tokens before it and of the seed."""
    digest = hashlib.sha256(bytes(text) + seed.to_bytes(4, "big")).digest()
    return digest[0] % POISON


def expected(prompt: Sequence[int], seed: int, max_tokens: int) -> list[int]:
    """The answer to a prompt, the token that stopped it among them."""
    text = list(prompt)
    for _ in range(max_tokens):
        text.append(next_token(text, seed))
        if text[-1] == EOS:
            break
    return text[len(prompt) :]


class DeviceLostError(RuntimeError):
    """A step fails, and with it the state."""


class TextDevice:
    """A `work.Runner`. `most`: tokens of prompts in a step; `steps`: tokens that a call may draw."""

    shapes: tuple[str, ...] = ()
    shares_sides = True
    side_tokens = 8

    def __init__(
        self, max_rows: int, num_pages: int, page_size: int, most: int = 8, steps: int = 1, failures: Sequence[int] = ()
    ):
        self.max_rows, self.num_pages, self.page_size = max_rows, num_pages, page_size
        self.most, self.steps, self.failures = most, steps, set(failures)
        self.num_runs = self.num_computed = 0
        self.reset()

    def warm_up(self) -> None:
        """Nothing to compile."""

    def reset(self) -> None:
        self._slots = np.full((self.num_pages + 1, self.page_size), -1)
        self._seeds: dict[int, tuple[int, int, int]] = {}

    def join(self, place: int, request: Request, seed: int, answer: Sequence[int], max_tokens: int) -> None:
        self._seeds[place] = (seed, len(request.prompt), max_tokens)

    def num_steps(self, num_rows: int) -> int:
        return self.steps

    def shares(self, num_rows: int, lengths: Sequence[int]) -> list[int]:
        return share_out(self.most, lengths, self.page_size)

    def run(self, spans: Sequence[Span], num_steps: int) -> list[Outcome]:
        self.num_runs += 1
        assert len({span.place for span in spans}) == len(spans) <= self.max_rows
        outcomes = [self._run(span, num_steps) for span in spans]
        if self.num_runs in self.failures:
            raise DeviceLostError("a step failed")
        return outcomes

    def _run(self, span: Span, num_steps: int) -> Outcome:
        seed, num_prompt, max_tokens = self._seeds[span.place]
        self.num_computed += len(span.tokens)
        for offset, token in enumerate(span.tokens):
            self._write(span, span.start + offset, token)
        if not span.draws:
            return Outcome()
        text = [self._read(span, position) for position in range(span.start + len(span.tokens))]
        drawn: list[int] = []
        for _ in range(num_steps if len(span.tokens) == 1 else 1):
            if drawn:
                self._write(span, len(text) - 1, drawn[-1])
            if POISON in text:
                return Outcome([*drawn, 1], *_nothing(len(drawn) + 1), is_finite=False)
            drawn.append(next_token(text, seed))
            text.append(drawn[-1])
            if drawn[-1] == EOS or len(text) - num_prompt == max_tokens:
                break
        return Outcome(drawn, *_nothing(len(drawn)))

    def _write(self, span: Span, position: int, token: int) -> None:
        page = span.pages[position // self.page_size]
        assert page > 0
        self._slots[page, position % self.page_size] = token

    def _read(self, span: Span, position: int) -> int:
        token = int(self._slots[span.pages[position // self.page_size], position % self.page_size])
        assert token >= 0, "a slot that nobody wrote is read"
        return token


def _nothing(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros(count, np.float32), np.zeros((count, 20), np.int32), np.zeros((count, 20), np.float32)
