"""From the JSON body of a completion or chat request to what the engine takes: every field honoured or refused by name.

Reads `serve.fields`, `serve.sampling_fields`, `serve.prompts`, `serve.tools`, `serve.served`, `infer.request`,
`inputs.chat` and `errors`; the endpoints call `parse_completion` and `parse_chat`, `serve.answers` reads the result. No jax.

Fields and defaults are those of OpenAI's API reference (/v1/completions, /v1/chat/completions), the sampling fields that
vLLM added (top_k, min_p, repetition_penalty, min_tokens, stop_token_ids, ignore_eos, guided_regex, guided_choice), and our
own `timeout_s` and `receipt`. Where we differ: max_tokens is a ceiling (the answer ends with "length" where the context
does), `user` is accepted and has no effect on the answer, as documented there, and the role "developer" is the system's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxml.errors import Faults, RequestError
from jaxml.infer.request import LANES, MAX_LOGPROBS, MAX_SEED, Deadlines, Lane, Request, Sampling
from jaxml.inputs.chat import encode_chat
from jaxml.serve.fields import Fields, shown
from jaxml.serve.prompts import read_messages, read_prompts
from jaxml.serve.sampling_fields import SAMPLING_FIELDS, read_sampling
from jaxml.serve.served import Served
from jaxml.serve.tools import TOOL_FIELDS, read_tools

DEFAULT_COMPLETION_TOKENS = 16
SHORTEST_TIMEOUT_S = 1e-3

# What OpenAI calls the lanes: what is asked, and what an answer says it was given.
LANE_OF_TIER: dict[str, Lane] = {"default": "normal", "flex": "batch", "priority": "interactive", "fast": "interactive"}
TIER_OF_LANE: dict[Lane, str] = {"normal": "default", "batch": "flex", "interactive": "priority"}

SHARED = ["model", "max_tokens", "n", "logprobs", *SAMPLING_FIELDS, "stream", "stream_options", "user"]
SHARED += ["service_tier", "timeout_s", "receipt"]
COMPLETION_FIELDS = [*SHARED, "prompt", "echo"]
CHAT_FIELDS = [*SHARED, "messages", "max_completion_tokens", "top_logprobs", *TOOL_FIELDS]

# Fields that OpenAI documents and we do not offer, with values besides null that ask for nothing.
REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"best_of": (1,), "suffix": ("",)}
REFUSED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "safety_identifier": (),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class UnknownModelError(RequestError):
    """A request for a model that is not served here."""


@dataclass(frozen=True)
class Choice:
    """One answer that is wanted: a prompt's ids and how to go on from them."""

    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class CompletionCall:
    """A request that can be right. `choices[prompt * n + i]` is the i-th answer to a prompt, as OpenAI numbers them.

    include_usage: a stream's last chunk counts tokens. echo: the prompt is told before the answer; wants_answer: the
    answer too (the engine gives one token in any case). service_tier: what the answer says it was given, if asked.
    """

    model: str
    choices: tuple[Choice, ...]
    n: int
    stream: bool
    include_usage: bool
    is_chat: bool
    echo: bool = False
    wants_answer: bool = True
    lane: Lane = "normal"
    service_tier: str | None = None
    deadlines: Deadlines = Deadlines()
    wants_receipt: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once however many choices it has."""
        return sum(len(choice.prompt) for choice in self.choices[:: self.n])

    @property
    def num_allowed_tokens(self) -> int:
        """Tokens of the prompts and the most that the answers may have."""
        return self.num_prompt_tokens + sum(choice.sampling.max_tokens or 0 for choice in self.choices)

    def requests(self, id: str, tenant: str = "") -> list[Request]:
        """What the engine takes, in the order of the choices; `id` is that of the whole response."""
        return [
            Request(
                f"{id}-{index}",
                choice.prompt,
                choice.sampling,
                lane=self.lane,
                tenant=tenant,
                deadlines=self.deadlines,
                wants_receipt=self.wants_receipt,
            )
            for index, choice in enumerate(self.choices)
        ]


def choose_model(body: Any, served: Mapping[str, Served]) -> Served:
    """The model that a body names; the only one, or the first, where it names none. Raises UnknownModelError.

    A name that is no text is left for the parser to refuse, with the other faults.
    """
    name = body.get("model") if isinstance(body, dict) else None
    if not isinstance(name, str):
        return next(iter(served.values()))
    return named_model(name, served)


def named_model(name: str, served: Mapping[str, Served]) -> Served:
    """The model of a name. Raises UnknownModelError."""
    if name not in served:
        names = ", ".join(map(repr, served))
        expected = f"the model that is served here, {names}" if len(served) == 1 else f"one of {names}"
        raise UnknownModelError("model", expected=expected, got=shown(name), todo="see /v1/models")
    return served[name]


def parse_completion(body: Any, served: Served, lanes: tuple[Lane, ...] = LANES) -> CompletionCall:
    """The call that the body of /v1/completions asks for. lanes: those that the caller may use.

    Raises RequestError with every fault, the first named after its field; UnknownModelError for another model's name.
    """
    fields = opened(body, served)
    fields.refuse_others(COMPLETION_FIELDS, REFUSED_IN_COMPLETIONS)
    num_logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    echo = fields.boolean("echo") or False
    max_tokens = fields.integer("max_tokens", 0 if echo else 1)
    max_tokens = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens
    prompts = read_prompts(fields, served.tokenizer, served.limits.prompts)
    call = _call(fields, prompts, max_tokens, num_logprobs, served, lanes)
    if not echo:
        return call
    # Whoever scores texts (lm-eval) counts on one entry for the one generated token, also where that ends a text.
    is_scoring = num_logprobs is not None and max_tokens <= 1
    choices = [
        dataclasses.replace(
            choice,
            sampling=dataclasses.replace(
                choice.sampling,
                num_prompt_logprobs=num_logprobs,
                ignore_eos=choice.sampling.ignore_eos or (is_scoring and choice.sampling.constraint is None),
            ),
        )
        for choice in call.choices
    ]
    return dataclasses.replace(call, choices=tuple(choices), echo=True, wants_answer=max_tokens > 0)


def parse_chat(body: Any, served: Served, lanes: tuple[Lane, ...] = LANES) -> CompletionCall:
    """The call that the body of /v1/chat/completions asks for. Arguments and errors as of `parse_completion`."""
    fields = opened(body, served)
    fields.refuse_others(CHAT_FIELDS, REFUSED_IN_CHAT)
    wants_logprobs = fields.boolean("logprobs")
    num_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if num_logprobs and not wants_logprobs:
        fields.wrong("top_logprobs", "logprobs to be true", "add logprobs: true, or leave top_logprobs out")
    max_tokens = fields.integer("max_tokens", 1)
    max_completion_tokens = fields.integer("max_completion_tokens", 1)
    if max_tokens and max_completion_tokens and max_tokens != max_completion_tokens:
        fields.wrong("max_tokens", f"the same as max_completion_tokens, {max_completion_tokens}", "give one of them")
    prompts = read_conversation(fields, served)
    asked_logprobs = (num_logprobs or 0) if wants_logprobs else None
    return _call(fields, prompts, max_completion_tokens or max_tokens, asked_logprobs, served, lanes, is_chat=True)


def read_conversation(fields: Fields, served: Served) -> list[tuple[str, tuple[int, ...]]]:
    """(name of the field, ids) of the one prompt that messages and tools make; none when they are wrong, which is noted."""
    before = len(fields.faults.found)
    messages, tools = read_messages(fields, served.limits), read_tools(fields, served.limits)
    if not messages or len(fields.faults.found) > before:
        return []
    try:
        return [("messages", tuple(encode_chat(served.tokenizer, messages, tools=tools)))]
    except RequestError as error:
        fields.adopt("messages", error)
        return []


def opened(body: Any, served: Served) -> Fields:
    """The fields of a body. Raises RequestError where it is no object, UnknownModelError at once."""
    if not isinstance(body, dict):
        raise RequestError("body", expected="a JSON object", got=shown(body), todo="send {...}")
    fields = Fields(body, Faults(RequestError))
    model = body.get("model")
    if isinstance(model, str):
        named_model(model, {served.name: served})
    elif model is not None:
        fields.wrong("model", f"text: {served.name!r}")
    if fields.values.get("user") is not None and not isinstance(fields.values["user"], str):
        fields.wrong("user", "text")
    return fields


def _call(
    fields: Fields,
    prompts: list[tuple[str, tuple[int, ...]]],
    max_tokens: int | None,
    num_logprobs: int | None,
    served: Served,
    lanes: tuple[Lane, ...],
    is_chat: bool = False,
) -> CompletionCall:
    """What both kinds of request share. `prompts` holds (name of the field, ids); max_tokens None: as many as fit."""
    limits = served.limits
    n = fields.integer("n", 1, limits.choices) or 1
    if n * len(prompts) > limits.answers:
        fields.wrong(
            "n", f"at most {limits.answers} answers", "ask for less at once", f"{n} to each of {len(prompts)} prompts"
        )
    stream = fields.boolean("stream") or False
    include_usage = _include_usage(fields, stream)
    lane, tier = read_lane(fields, lanes)
    deadlines = read_deadlines(fields, served)
    wants_receipt = fields.boolean("receipt") or False
    sampling = dataclasses.replace(read_sampling(fields, served), num_logprobs=num_logprobs)
    if max_tokens is not None and sampling.min_tokens > max_tokens:
        fields.wrong("min_tokens", f"at most max_tokens, {max_tokens}")
    choices: list[Choice] = []
    for name, prompt in prompts:
        room = check_room(fields, name, prompt, served)
        within = dataclasses.replace(sampling, max_tokens=min(room if max_tokens is None else max(1, max_tokens), room))
        choices += [Choice(prompt, _seeded(within, index)) for index in range(n)]
    fields.faults.raise_if_any()
    return CompletionCall(
        served.name,
        tuple(choices),
        n,
        stream,
        include_usage,
        is_chat,
        lane=lane,
        service_tier=tier,
        deadlines=deadlines,
        wants_receipt=wants_receipt,
    )


def check_room(fields: Fields, name: str, prompt: tuple[int, ...], served: Served) -> int:
    """How many tokens fit behind a prompt; a fault is noted when that is none."""
    most = served.context_length - 1
    if len(prompt) > most:
        expected = f"at most {most} tokens: the context is {served.context_length}, and 1 must be left for the answer"
        fields.wrong(name, expected, "shorten it", f"{len(prompt)} tokens")
    return served.context_length - len(prompt)


def _seeded(sampling: Sampling, index: int) -> Sampling:
    """The sampling of a prompt's choice: choices differ, and each is the same whatever else the request holds."""
    seed = None if sampling.seed is None else (sampling.seed + index) % (MAX_SEED + 1)
    return dataclasses.replace(sampling, seed=seed)


def read_lane(fields: Fields, lanes: tuple[Lane, ...]) -> tuple[Lane, str | None]:
    """The lane, and what the answer calls it (None: it was not asked). By default the normal one, where that is allowed."""
    tier = fields.values.get("service_tier")
    if tier is None or tier == "auto":
        lane: Lane = "normal" if "normal" in lanes else lanes[0]
        return lane, None if tier is None else TIER_OF_LANE[lane]
    known = {name: lane for name, lane in LANE_OF_TIER.items() if lane in lanes}
    if not isinstance(tier, str) or tier not in known:
        fields.wrong("service_tier", "one of " + ", ".join(("auto", *known)))
        return "normal", None
    return known[tier], TIER_OF_LANE[known[tier]]


def read_deadlines(fields: Fields, served: Served) -> Deadlines:
    """The service's, of which `timeout_s` may shorten the total."""
    timeout_s = fields.number("timeout_s", SHORTEST_TIMEOUT_S, served.limits.timeout_s)
    if timeout_s is None:
        return served.deadlines
    own = served.deadlines.total_s
    return dataclasses.replace(served.deadlines, total_s=timeout_s if own is None else min(own, timeout_s))


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
