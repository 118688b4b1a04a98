"""From the JSON body of a completion or chat request to what the engine takes: every field honoured or refused by name.

Reads `serve.fields`, `serve.prompts`, `infer.request`, `inputs.chat`, `inputs.tokenizers` and `errors`; the endpoints
call `parse_completion` and `parse_chat`, `serve.answers` reads the result. No jax.

Fields and defaults are those of OpenAI's API reference (/v1/completions, /v1/chat/completions) and the sampling fields
that vLLM added (top_k, min_p, repetition_penalty, min_tokens, stop_token_ids). Where we differ: max_tokens is a ceiling
(the answer ends with "length" where the context does), `user` is accepted and has no effect on the answer, as documented
there, and the role "developer" is the system's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxml.errors import Faults, RequestError
from jaxml.infer.request import MAX_LOGPROBS, MAX_SEED, MAX_STOP_STRINGS, MAX_STOP_TOKENS, Request, Sampling
from jaxml.inputs.chat import encode_chat
from jaxml.inputs.tokenizers import Tokenizer
from jaxml.serve.fields import Fields, shown
from jaxml.serve.prompts import are_ids, read_messages, read_prompts

DEFAULT_COMPLETION_TOKENS = 16

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
SHARED = ["model", "max_tokens", "min_tokens", "n", "top_k", "seed", "stop", "stop_token_ids", "logprobs", *NUMBERS]
SHARED += ["stream", "stream_options", "user"]
COMPLETION_FIELDS = [*SHARED, "prompt"]
CHAT_FIELDS = [*SHARED, "messages", "max_completion_tokens", "top_logprobs"]

# Fields that OpenAI documents and we do not offer, with values besides null that ask for nothing.
REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "logit_bias": ({},),
    "suffix": ("",),
}
REFUSED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto",),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for. answers: choices of all prompts together. stop_characters: of each string."""

    body_bytes: int = 2**20
    choices: int = 16
    prompts: int = 32
    answers: int = 64
    messages: int = 1024
    content_parts: int = 64
    stop_strings: int = MAX_STOP_STRINGS
    stop_characters: int = 256
    stop_tokens: int = MAX_STOP_TOKENS


class UnknownModelError(RequestError):
    """A request for a model that is not served here."""


@dataclass(frozen=True)
class Served:
    """What requests are checked against: the model that is served, by its name, and what it can take."""

    model_name: str
    tokenizer: Tokenizer
    context_length: int
    limits: Limits


@dataclass(frozen=True)
class Choice:
    """One answer that is wanted: a prompt's ids and how to go on from them."""

    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class CompletionCall:
    """A request that can be right. `choices[prompt * n + i]` is the i-th answer to a prompt, as OpenAI numbers them.

    include_usage: a stream's last chunk counts tokens.
    """

    model: str
    choices: tuple[Choice, ...]
    n: int
    stream: bool
    include_usage: bool
    is_chat: bool

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once however many choices it has."""
        return sum(len(choice.prompt) for choice in self.choices[:: self.n])

    def requests(self, id: str) -> list[Request]:
        """What the engine takes, in the order of the choices; `id` is that of the whole response."""
        return [Request(f"{id}-{i}", choice.prompt, choice.sampling) for i, choice in enumerate(self.choices)]


def parse_completion(
    body: Any, model_name: str, tokenizer: Tokenizer, context_length: int, limits: Limits = Limits()
) -> CompletionCall:
    """The call that the body of /v1/completions asks for.

    Raises RequestError with every fault, the first named after its field; UnknownModelError for another model's name.
    """
    served = Served(model_name, tokenizer, context_length, limits)
    fields = _opened(body, model_name)
    fields.refuse_others(COMPLETION_FIELDS, REFUSED_IN_COMPLETIONS)
    num_logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    max_tokens = fields.integer("max_tokens", 1) or DEFAULT_COMPLETION_TOKENS
    prompts = read_prompts(fields, tokenizer, limits.prompts)
    return _call(fields, prompts, max_tokens, num_logprobs, served)


def parse_chat(
    body: Any, model_name: str, tokenizer: Tokenizer, context_length: int, limits: Limits = Limits()
) -> CompletionCall:
    """The call that the body of /v1/chat/completions asks for. Raises as `parse_completion` does."""
    served = Served(model_name, tokenizer, context_length, limits)
    fields = _opened(body, model_name)
    fields.refuse_others(CHAT_FIELDS, REFUSED_IN_CHAT)
    wants_logprobs = fields.boolean("logprobs")
    num_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if num_logprobs and not wants_logprobs:
        fields.wrong("top_logprobs", "logprobs to be true", "add logprobs: true, or leave top_logprobs out")
    max_tokens = fields.integer("max_tokens", 1)
    max_completion_tokens = fields.integer("max_completion_tokens", 1)
    if max_tokens and max_completion_tokens and max_tokens != max_completion_tokens:
        fields.wrong("max_tokens", f"the same as max_completion_tokens, {max_completion_tokens}", "give one of them")
    messages = read_messages(fields, limits.messages, limits.content_parts)
    prompts: list[tuple[str, tuple[int, ...]]] = []
    if messages:
        try:
            prompts = [("messages", tuple(encode_chat(tokenizer, messages)))]
        except RequestError as error:
            fields.adopt("messages", error)
    asked_logprobs = (num_logprobs or 0) if wants_logprobs else None
    return _call(fields, prompts, max_completion_tokens or max_tokens, asked_logprobs, served, is_chat=True)


def _opened(body: Any, model_name: str) -> Fields:
    """The fields of a body. Raises RequestError where it is no object, UnknownModelError at once."""
    if not isinstance(body, dict):
        raise RequestError("body", expected="a JSON object", got=shown(body), todo="send {...}")
    fields = Fields(body, Faults(RequestError))
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        fields.wrong("model", f"text: {model_name!r}")
    elif model is not None and model != model_name:
        raise UnknownModelError(
            "model", expected=f"the model that is served here, {model_name!r}", got=shown(model), todo="see /v1/models"
        )
    return fields


def _call(
    fields: Fields,
    prompts: list[tuple[str, tuple[int, ...]]],
    max_tokens: int | None,
    num_logprobs: int | None,
    served: Served,
    is_chat: bool = False,
) -> CompletionCall:
    """What both kinds of request share. `prompts` holds (name of the field, ids)."""
    limits, context_length = served.limits, served.context_length
    n = fields.integer("n", 1, limits.choices) or 1
    if n * len(prompts) > limits.answers:
        fields.wrong(
            "n", f"at most {limits.answers} answers", "ask for less at once", f"{n} to each of {len(prompts)} prompts"
        )
    stream = fields.boolean("stream") or False
    include_usage = _include_usage(fields, stream)
    if fields.values.get("user") is not None and not isinstance(fields.values["user"], str):
        fields.wrong("user", "text")
    sampling = dataclasses.replace(_sampling(fields, served), max_tokens=max_tokens, num_logprobs=num_logprobs)
    if max_tokens and sampling.min_tokens > max_tokens:
        fields.wrong("min_tokens", f"at most max_tokens, {max_tokens}")
    choices: list[Choice] = []
    for name, prompt in prompts:
        room = context_length - len(prompt)
        if room < 1:
            fields.wrong(
                name,
                f"at most {context_length - 1} tokens: the context is {context_length}, and 1 must be left for the answer",
                "shorten it",
                f"{len(prompt)} tokens",
            )
        within = dataclasses.replace(sampling, max_tokens=min(max_tokens or room, room))
        choices += [Choice(prompt, _seeded(within, index)) for index in range(n)]
    fields.faults.raise_if_any()
    return CompletionCall(served.model_name, tuple(choices), n, stream, include_usage, is_chat)


def _seeded(sampling: Sampling, index: int) -> Sampling:
    """The sampling of a prompt's choice: choices differ, and each is the same whatever else the request holds."""
    seed = None if sampling.seed is None else (sampling.seed + index) % (MAX_SEED + 1)
    return dataclasses.replace(sampling, seed=seed)


def _sampling(fields: Fields, served: Served) -> Sampling:
    """The fields that say how to choose a token; faults are noted, and the defaults stand for what is wrong."""
    given: dict[str, Any] = {name: fields.number(name, low, high) for name, (low, high) in NUMBERS.items()}
    temperature = given["temperature"]
    if temperature is not None and 0 < temperature < SMALLEST_TEMPERATURE:
        fields.wrong("temperature", f"0, or from {SMALLEST_TEMPERATURE:g} up", "take 0 for the most likely token")
        given["temperature"] = None
    given |= {name: fields.integer(name, 0) for name in ("top_k", "min_tokens")}
    given["seed"] = fields.integer("seed", 0, MAX_SEED)
    given["stop"] = _stop_strings(fields, served.limits)
    given["stop_token_ids"] = _stop_tokens(fields, served.tokenizer, served.limits)
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


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.values.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not stream:
        fields.wrong("stream_options", "an object, with stream: true", "leave it out, or stream the answer")
        return False
    inner = Fields(options, fields.faults, "stream_options.")
    inner.refuse_others(["include_usage"], {"include_obfuscation": (False,)})
    return inner.boolean("include_usage") or False
