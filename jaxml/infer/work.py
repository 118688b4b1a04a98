"""What one step of the engine computes, as data: spans of tokens to run, and what came of each. No jax.

Reads `infer.request`; `infer.scheduler` plans spans, a `Runner` (`infer.runner`) computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from jaxml.infer.request import MAX_LOGPROBS, Request

# What is computed beside the next token: the log-probabilities of the prompt's tokens, or the sum of its final features.
Side = Literal["scores", "features"]


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one request whose keys and values are to be computed.

    place: the request's row of sampling state. start: the position of the first token. pages: of the whole row, enough for
    these tokens and for those that a step of several draws writes. draws: whether the next token is drawn after the last.
    allowed: the tokens that may come next, as words of `sampling.Rows.allowed`; None: all. targets: with side "scores",
    the token after each of these. ticket: a number of the request, for the place may have gone to another when the result
    is there.
    """

    place: int
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    draws: bool = True
    allowed: np.ndarray | None = None
    side: Side | None = None
    targets: Sequence[int] = ()
    ticket: int = -1


def _none(*shape: int) -> np.ndarray:
    return np.zeros((0, *shape), np.float32)


@dataclass(frozen=True)
class Outcome:
    """What came of a span: the tokens drawn (n, none where it does not draw), their log-probabilities and the most likely
    ones (where they were asked for). is_finite: the logits were; where not, the last token means nothing.

    scores: of a side of that name, (log-probabilities [t], most likely tokens [t, 20], theirs [t, 20]) of the targets.
    features: the sum over the span's tokens.
    """

    tokens: Sequence[int] = ()
    logprobs: Float[np.ndarray, " n"] = field(default_factory=_none)
    top_tokens: Int[np.ndarray, "n 20"] = field(default_factory=lambda: _none(MAX_LOGPROBS).astype(np.int32))
    top_logprobs: Float[np.ndarray, "n 20"] = field(default_factory=lambda: _none(MAX_LOGPROBS))
    is_finite: bool = True
    scores: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    features: Float[np.ndarray, " D"] | None = None


def share_out(room: int, lengths: Sequence[int], page_size: int) -> list[int]:
    """How many tokens of each prompt (of which `lengths` are left) to compute where there is room for `room`, the first of
    them first. What does not end a prompt is whole pages.

    >>> share_out(20, [7, 30, 5], 4), share_out(20, [3, 4], 4)
    ([7, 12, 0], [3, 4])
    """
    shares = []
    for length in lengths:
        share = length if length <= room else room // page_size * page_size
        shares.append(share)
        room -= share
    return shares


@runtime_checkable
class Runner(Protocol):
    """Computes spans for at most `max_rows` requests whose keys and values lie in `num_pages` pages."""

    max_rows: int
    num_pages: int
    page_size: int
    side_tokens: int  # the most tokens of a span with a side; whole pages
    shares_sides: bool  # whether pages that a side filled hold what other spans would have filled them with

    @property
    def shapes(self) -> list[str]:
        """The programs that `warm_up` compiles."""
        ...

    def warm_up(self) -> None:
        """Compile every program. Nothing may be running."""
        ...

    def join(self, place: int, request: Request, seed: int, answer: Sequence[int], max_tokens: int) -> None:
        """Set up a row of sampling state: that of a request of which `answer` was generated already."""
        ...

    def num_steps(self, num_rows: int) -> int:
        """How many tokens to draw for rows that only decode, before others are looked at."""
        ...

    def shares(self, num_rows: int, lengths: Sequence[int]) -> list[int]:
        """How many tokens of each prompt (of which `lengths` are left, the first is the oldest) to compute beside
        `num_rows` rows that decode. One of them is more than 0 if there is any prompt and room. Pieces that do not end
        a prompt are whole pages."""
        ...

    def run(self, spans: Sequence[Span], num_steps: int) -> list[Outcome]:
        """Compute spans, of different requests. Spans of one token without a side may draw `num_steps` tokens."""
        ...

    def reset(self) -> None:
        """Forget all rows and pages, after an error."""
        ...
