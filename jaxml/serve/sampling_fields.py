"""The fields of a request that say how to choose a token.

Reads `serve.fields`, `serve.formats`, `serve.prompts`, `serve.served`, `infer.request` and `inputs.tokenizers`;
`serve.requests` calls `read_sampling`.
"""

from __future__ import annotations

import re
from typing import Any

from jaxml.infer.request import MAX_BIAS, MAX_BIASED_TOKENS, MAX_SEED, Sampling
from jaxml.inputs.tokenizers import Tokenizer
from jaxml.serve.fields import Fields
from jaxml.serve.formats import CONSTRAINT_FIELDS, read_constraint
from jaxml.serve.prompts import are_ids
from jaxml.serve.served import Limits, Served

# Ranges of numbers beyond what `Sampling.faults` asks: OpenAI's, and what float32 can divide by.
NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
SMALLEST_TEMPERATURE = 1e-6
SAMPLING_FIELDS = [*NUMBERS, "top_k", "min_tokens", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias"]
SAMPLING_FIELDS += CONSTRAINT_FIELDS
TOKEN_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")


def read_sampling(fields: Fields, served: Served) -> Sampling:
    """How to choose, but for max_tokens and log-probabilities; faults are noted, and defaults stand for what is wrong."""
    given: dict[str, Any] = {name: fields.number(name, low, high) for name, (low, high) in NUMBERS.items()}
    temperature = given["temperature"]
    if temperature is not None and 0 < temperature < SMALLEST_TEMPERATURE:
        fields.wrong("temperature", f"0, or from {SMALLEST_TEMPERATURE:g} up", "take 0 for the most likely token")
        given["temperature"] = None
    given |= {name: fields.integer(name, 0) for name in ("top_k", "min_tokens")}
    given["seed"] = fields.integer("seed", 0, MAX_SEED)
    given["stop"] = _stop_strings(fields, served.limits)
    given["stop_token_ids"] = _stop_tokens(fields, served.tokenizer, served.limits)
    given["ignore_eos"] = fields.boolean("ignore_eos")
    given["logit_bias"] = _logit_bias(fields, served.tokenizer)
    given["constraint"] = read_constraint(fields)
    if given["constraint"] is not None:
        # Where its grammar ends, nothing but the end of the text can follow.
        for name in ("min_tokens", "ignore_eos"):
            if given[name]:
                fields.wrong(name, "nothing beside a response_format or a guide", "leave one of them out")
                given[name] = None
    sampling = Sampling(**{name: value for name, value in given.items() if value is not None})
    for fault in sampling.faults(served.tokenizer.vocab_size):
        fields.wrong(fault.failed, fault.expected, fault.todo)
    return sampling


def _stop_strings(fields: Fields, limits: Limits) -> tuple[str, ...]:
    value = fields.values.get("stop")
    strings = [] if value is None else value if isinstance(value, list) else [value]
    longest = limits.stop_characters
    right = all(isinstance(item, str) and 0 < len(item) <= longest and _is_unicode(item) for item in strings)
    if not right or len(strings) > limits.stop_strings:
        expected = f"text, or a list of at most {limits.stop_strings} texts, each of 1 to {longest} characters"
        fields.wrong("stop", expected)
        return ()
    return tuple(strings)


def _is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _stop_tokens(fields: Fields, tokenizer: Tokenizer, limits: Limits) -> tuple[int, ...]:
    value = fields.values.get("stop_token_ids")
    if value is None:
        return ()
    if isinstance(value, list) and len(value) <= limits.stop_tokens and are_ids(value, tokenizer):
        return tuple(value)
    expected = f"a list of at most {limits.stop_tokens} token ids from 0 to {tokenizer.vocab_size - 1}"
    fields.wrong("stop_token_ids", expected)
    return ()


def _logit_bias(fields: Fields, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    value = fields.values.get("logit_bias")
    if value is None:
        return ()
    if isinstance(value, dict) and len(value) <= MAX_BIASED_TOKENS:
        biases = [
            (int(token), float(bias))
            for token, bias in value.items()
            if TOKEN_NUMBER.fullmatch(token) and type(bias) in (int, float) and -MAX_BIAS <= bias <= MAX_BIAS
        ]
        if len(biases) == len(value) and all(token < tokenizer.vocab_size for token, _ in biases):
            return tuple(biases)
    expected = (
        f"an object of at most {MAX_BIASED_TOKENS} token ids from 0 to {tokenizer.vocab_size - 1}, as texts, each "
    )
    fields.wrong("logit_bias", expected + f"with a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return ()
