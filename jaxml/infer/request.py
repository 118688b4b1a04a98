"""What can be asked of a model and what it answers, as data. No jax.

Reads `errors`; `infer.sampling` turns a `Sampling` into arrays, `infer.engine` takes a `Request` and yields `Event`s,
`serve` makes them from HTTP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jaxml.errors import Fault, RequestError

FinishReason = Literal["stop", "length", "error"]

MAX_STOP_TOKENS = 16
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The defaults sample from the model's own distribution.

    max_tokens: a ceiling on generated tokens (None: what fits into the context). min_tokens: until so many are there, the
    tokens that would stop are not chosen (a stop string ends an answer at any length).
    temperature: logits are divided by it; 0 takes the most likely token.
    top_k: only the k most likely (0: all). top_p: the smallest set that holds this share of the probability. min_p: what is
    at least this share of the most likely one.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the answer (1: off).
    presence_penalty, frequency_penalty: subtracted once, and once per occurrence, for tokens of the answer (0: off).
    seed: the draw at a position depends on (seed, position) alone; None takes a fresh one.
    stop: strings that end the answer and are not part of it. stop_token_ids: tokens that do (the tokenizer's own end of
    text always does).
    num_logprobs: log-probabilities of the chosen tokens and of that many most likely ones (None: none), of the model's own
    distribution, before penalties and temperature.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None

    def faults(self, vocab_size: int | None = None) -> list[Fault]:
        """Every field that is out of range. Comparisons are written so that NaN fails them."""
        checks: list[tuple[str, bool, str]] = [
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("temperature", 0.0 <= self.temperature < math.inf, "finite, and at least 0"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "finite, and above 0"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "finite"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "finite"),
            ("seed", self.seed is None or 0 <= self.seed <= MAX_SEED, f"from 0 to {MAX_SEED}, or None"),
            ("stop", len(self.stop) <= MAX_STOP_STRINGS and all(self.stop), f"at most {MAX_STOP_STRINGS}, none empty"),
            ("stop_token_ids", len(self.stop_token_ids) <= MAX_STOP_TOKENS, f"at most {MAX_STOP_TOKENS}"),
            (
                "num_logprobs",
                self.num_logprobs is None or 0 <= self.num_logprobs <= MAX_LOGPROBS,
                f"from 0 to {MAX_LOGPROBS}, or None",
            ),
        ]
        if vocab_size is not None:
            inside = all(0 <= token < vocab_size for token in self.stop_token_ids)
            checks.append(("stop_token_ids", inside, f"ids from 0 to {vocab_size - 1}"))
        wrong = [(name, expected) for name, holds, expected in checks if not holds]
        return [Fault(name, expected, repr(getattr(self, name))[:60], f"correct {name}") for name, expected in wrong]

    def checked(self, vocab_size: int | None = None) -> Sampling:
        """Itself. Raises RequestError with every fault."""
        faults = self.faults(vocab_size)
        if faults:
            raise RequestError.from_faults(faults)
        return self


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Request:
    """One answer that is wanted. `prompt` holds token ids, at least one. `id` is unique among those that are running."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token's log-probability (nats) and the most likely tokens at its place, (id, log-probability) each."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Event:
    """What one step of the engine says about one request. The texts of its events, joined, are the answer.

    tokens: those of this step, the stop token not among them; `num_tokens` counts all so far, and the stop token.
    finish_reason is None in all events but the last. error says what went wrong when it is "error".
    """

    id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    num_tokens: int = 0
    error: str = ""
