"""What can be asked of a model and what it answers, as data. No jax.

Reads `errors`; `infer.sampling` turns a `Sampling` into arrays, `infer.engine` takes a `Request` and yields `Event`s,
`serve` makes them from HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxml.errors import Fault, RequestError

FinishReason = Literal["stop", "length", "error"]
# Why a request ended with "error". deadline: one of its own. non_finite: the model gave NaN or infinity. constraint: its
# grammar could not be followed. stuck: a step took longer than the watchdog allows. closed: the engine was stopped. lost:
# the process that computes it has ended. internal: a step failed.
ErrorKind = Literal["deadline", "non_finite", "constraint", "stuck", "closed", "lost", "internal"]
# Who waits how long where requests queue: interactive first, batch last; waiting makes up for it (`infer.queueing`).
Lane = Literal["interactive", "normal", "batch"]
LANES: tuple[Lane, ...] = ("interactive", "normal", "batch")

MAX_STOP_TOKENS = 16
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 300
MAX_BIAS = 100.0
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class Constraint:
    """What the text of an answer must match, as the source of a grammar for `infer.constraints`.

    source: a JSON schema, a regular expression, or a JSON list of texts of which one is the answer.
    """

    kind: Literal["json_schema", "regex", "choice"]
    source: str


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
    text does too, unless ignore_eos).
    num_logprobs: log-probabilities of the chosen tokens and of that many most likely ones (None: none), of the model's own
    distribution, before penalties and temperature. num_prompt_logprobs: the same for the tokens of the prompt.
    logit_bias: (token, what is added to its logit, from -100 to 100); the last thing before temperature.
    constraint: the answer's text must match it; it ends where it cannot go on ("stop"), or with "length".
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
    num_prompt_logprobs: int | None = None
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None

    def faults(self, vocab_size: int | None = None) -> list[Fault]:
        """Every field that is out of range. Comparisons are written so that NaN fails them."""
        checks: list[tuple[str, bool, str]] = [
            (
                "max_tokens",
                self.max_tokens is None or self.max_tokens >= (self.num_prompt_logprobs is None),
                "at least 1, or None (0 where the prompt's log-probabilities are asked for)",
            ),
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
            ("num_logprobs", _is_count(self.num_logprobs), f"from 0 to {MAX_LOGPROBS}, or None"),
            ("num_prompt_logprobs", _is_count(self.num_prompt_logprobs), f"from 0 to {MAX_LOGPROBS}, or None"),
            (
                "logit_bias",
                len(self.logit_bias) <= MAX_BIASED_TOKENS
                and all(-MAX_BIAS <= bias <= MAX_BIAS for _, bias in self.logit_bias),
                f"at most {MAX_BIASED_TOKENS} tokens, each with a number from {-MAX_BIAS:g} to {MAX_BIAS:g}",
            ),
        ]
        if vocab_size is not None:
            ids = f"ids from 0 to {vocab_size - 1}"
            checks.append(("stop_token_ids", all(0 <= token < vocab_size for token in self.stop_token_ids), ids))
            checks.append(("logit_bias", all(0 <= token < vocab_size for token, _ in self.logit_bias), ids))
        wrong = [(name, expected) for name, holds, expected in checks if not holds]
        return [Fault(name, expected, repr(getattr(self, name))[:60], f"correct {name}") for name, expected in wrong]

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Sampling:
        """The sampling whose `dataclasses.asdict` this is, also after a trip through JSON, which has lists for tuples."""
        fields: dict[str, Any] = dict(value)
        for name in ("stop", "stop_token_ids"):
            fields[name] = tuple(fields[name])
        fields["logit_bias"] = tuple((token, bias) for token, bias in fields["logit_bias"])
        if fields["constraint"] is not None:
            fields["constraint"] = Constraint(**fields["constraint"])
        return cls(**fields)

    def checked(self, vocab_size: int | None = None) -> Sampling:
        """Itself. Raises RequestError with every fault."""
        faults = self.faults(vocab_size)
        if faults:
            raise RequestError.from_faults(faults)
        return self


GREEDY = Sampling(temperature=0.0)


def _is_count(value: int | None) -> bool:
    return value is None or 0 <= value <= MAX_LOGPROBS


@dataclass(frozen=True)
class Deadlines:
    """Seconds after submission at which a request ends with the error "deadline"; None: never.

    queue_s: when it has not left the queue by then. first_token_s: when it has no token. total_s: when it has not ended.
    """

    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True)
class Request:
    """One answer that is wanted. `prompt` holds token ids, at least one. `id` is unique among those that are running.

    tenant: on whose behalf; tenants of a lane share the engine by tokens. wants_embedding: the mean of the prompt's final
    features, of length 1, instead of an answer. wants_receipt: the last event says how to generate this again.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    lane: Lane = "normal"
    tenant: str = ""
    deadlines: Deadlines = Deadlines()
    wants_embedding: bool = False
    wants_receipt: bool = False


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
    finish_reason is None in all events but the last; when it is "error", `error` is the kind and `detail` says more (never
    anything of the prompt or the answer).
    In the first event: queue_s, the seconds in the queue; num_cached, tokens of the prompt whose keys and values were there
    already; prompt_logprobs, one entry for each token of the prompt but the first, if they were asked for.
    In the last: embedding, receipt (plain values), if they were asked for.
    """

    id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    num_tokens: int = 0
    error: ErrorKind | None = None
    detail: str = ""
    queue_s: float | None = None
    num_cached: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: tuple[float, ...] = ()
    receipt: dict[str, Any] | None = None
