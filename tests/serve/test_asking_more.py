"""What a request can ask beside sampling: bias, form, echo and scores, lanes, deadlines, receipts, tools."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from jaxml.errors import RequestError
from jaxml.infer.constraints import Vocabulary, compile_constraint
from jaxml.infer.request import Constraint, Deadlines, Event, TokenLogprob
from jaxml.serve import formats
from jaxml.serve.answers import Answer
from jaxml.serve.requests import choose_model, parse_completion
from jaxml.serve.served import Served
from tests.serve.asking import BYTES, CONTEXT, HELLO, SUBWORD, chat, completion, model, refusal, with_template

BOTH = pytest.mark.parametrize("parse", [completion, chat])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


MANY, LONG = {str(token): 1 for token in range(301)}, {"9" * 5000: 1}


def json_schema(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@BOTH
def test_a_bias_and_ignoring_the_end_reach_the_engine(parse: Callable[..., Any]) -> None:
    sampling = parse(logit_bias={"5": -100, "0": 2.5}, ignore_eos=True).choices[0].sampling
    assert (sampling.logit_bias, sampling.ignore_eos) == (((5, -100.0), (0, 2.5)), True)
    assert parse(logit_bias={}, ignore_eos=False).choices[0].sampling.logit_bias == ()


@BOTH
@pytest.mark.parametrize(
    "bias",
    [
        5,
        [1],
        {"a": 1},
        {"-1": 1},
        {"05": 1},
        {"99999": 1},
        {"1": 100.5},
        {"1": "2"},
        {"1": True},
        {"1": None},
        {"١": 1},
        MANY,
        LONG,
    ],
)
def test_a_bias_is_for_tokens_of_the_vocabulary_and_bounded(parse: Callable[..., Any], bias: Any) -> None:
    assert refusal(parse, logit_bias=bias)[0] == "logit_bias"


@BOTH
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint("json_schema", '{"type":"object"}')),
        ({"response_format": json_schema()}, Constraint("json_schema", json.dumps(SCHEMA))),
        ({"response_format": json_schema(strict=True, description="x")}, Constraint("json_schema", json.dumps(SCHEMA))),
        ({"guided_regex": "a+"}, Constraint("regex", "a+")),
        ({"guided_choice": ["a", "é"]}, Constraint("choice", json.dumps(["a", "é"]))),
    ],
)
def test_a_form_becomes_a_constraint_that_compiles(parse: Callable[..., Any], body: Any, expected: Any) -> None:
    constraint = parse(**body).choices[0].sampling.constraint
    assert constraint == expected
    if expected is not None:
        assert compile_constraint(constraint, Vocabulary.of(BYTES)).mask().any()


def deep(levels: int) -> dict[str, Any]:
    return {"items": deep(levels - 1)} if levels else {}


@BOTH
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": []}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema(name="a b")}, "response_format.json_schema.name"),
        ({"response_format": json_schema(strict=1)}, "response_format.json_schema.strict"),
        ({"response_format": json_schema(description=1)}, "response_format.json_schema.description"),
        ({"response_format": json_schema(None)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(deep(40))}, "response_format.json_schema.schema"),
        ({"response_format": json_schema({"const": "x" * 70_000})}, "response_format.json_schema.schema"),
        ({"response_format": json_schema({"x-guidance": {}})}, "response_format.json_schema.schema"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": ["a"] * 2000}, "guided_choice"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"guided_choice": ["a"], "min_tokens": 1}, "min_tokens"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_a_form_that_is_wrong_or_too_much_is_refused_by_name(parse: Callable[..., Any], body: Any, field: str) -> None:
    assert refusal(parse, **body)[0] == field


def test_a_form_is_refused_where_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
    field, said = refusal(completion, guided_regex="a")
    assert field == "guided_regex" and "constrain" in said
    assert completion(response_format={"type": "text"}).choices[0].sampling.constraint is None


def test_echo_with_scores_is_what_lm_eval_posts() -> None:
    # lm_eval.models.openai_completions.LocalCompletionsAPI._create_payload, for a batch of multiple-choice questions.
    prompts = [[104, 101, 108], [104, 105]]
    body = {
        "model": "shk",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    call = parse_completion(body, model(BYTES))
    assert [choice.prompt for choice in call.choices] == [tuple(prompt) for prompt in prompts]
    sampling = call.choices[0].sampling
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs, sampling.max_tokens) == (1, 1, 1)
    assert sampling.ignore_eos, "the generated token has an entry, also when it ends the text"
    answer = Answer(call, BYTES)
    for request in answer.requests:
        scores = tuple(TokenLogprob(token, -float(token), ((97, -0.5),)) for token in request.prompt[1:])
        last = TokenLogprob(120, -9.0, ((120, -9.0),))
        answer.take(Event(request.id, (120,), "x", (last,), "length", 1, prompt_logprobs=scores))
    choices = answer.reply().body["choices"]
    for choice, prompt, ctxlen in zip(choices, prompts, (1, 1), strict=True):
        # As its parse_logprobs reads an answer.
        told = choice["logprobs"]["token_logprobs"]
        assert told[ctxlen:-1] == [-float(token) for token in prompt[ctxlen:]]
        assert all(max(top.values()) == -0.5 for top in choice["logprobs"]["top_logprobs"][ctxlen:-1])
        assert told[0] is None and choice["logprobs"]["top_logprobs"][0] is None
        assert choice["text"] == bytes(prompt).decode() + "x"
        assert choice["logprobs"]["text_offset"] == list(range(len(prompt) + 1))


def echoed(stream: bool, **body: Any) -> list[dict[str, Any]]:
    """The choices of an answer "xy" to "hello", whole or in chunks."""
    answer = Answer(completion(echo=True, stream=stream, **body), BYTES)
    (request,) = answer.requests
    scored = request.sampling.num_prompt_logprobs is not None
    scores = tuple(TokenLogprob(token, -1.0) for token in request.prompt[1:]) if scored else ()
    logprobs = (TokenLogprob(120, -2.0),) if scored else ()
    answer.take(Event(request.id, (120,), "x", logprobs, None, 1, prompt_logprobs=scores))
    first = answer.chunks() if stream else []
    logprobs = (TokenLogprob(121, -2.0),) if scored else ()
    answer.take(Event(request.id, (121,), "y", logprobs, "length", 2))
    bodies = [*first, *answer.chunks()] if stream else [answer.reply().body]
    return [choice for body in bodies for choice in body["choices"]]


@pytest.mark.parametrize("logprobs", [None, 0])
def test_an_echo_comes_first_whole_and_streamed(logprobs: int | None) -> None:
    (whole,) = echoed(False, logprobs=logprobs)
    chunks = echoed(True, logprobs=logprobs)
    assert whole["text"] == "".join(choice["text"] for choice in chunks) == "helloxy"
    assert chunks[0]["text"] == "hellox"
    if logprobs is None:
        assert whole["logprobs"] is None
    else:
        for key, values in whole["logprobs"].items():
            assert [item for choice in chunks if choice["logprobs"] for item in choice["logprobs"][key]] == values
        assert whole["logprobs"]["text_offset"] == list(range(7))


def test_no_token_at_all_may_be_asked_for_exactly_with_an_echo() -> None:
    assert refusal(completion, max_tokens=0)[0] == refusal(completion, max_tokens=0, echo=False)[0] == "max_tokens"
    assert refusal(chat, max_tokens=0)[0] == "max_tokens"
    call = completion(max_tokens=0, echo=True)
    assert not call.wants_answer and call.choices[0].sampling.max_tokens == 1
    (choice,) = echoed(False, max_tokens=0, logprobs=0)
    assert (choice["text"], choice["finish_reason"], len(choice["logprobs"]["tokens"])) == ("hello", "length", 5)
    answer = Answer(call, BYTES)
    answer.take(Event(answer.requests[0].id, (120,), "x", (), "stop", 1))
    assert answer.reply().body["usage"]["completion_tokens"] == 0
    assert answer.reply().body["choices"][0]["finish_reason"] == "length"


def test_an_echo_is_not_a_field_of_a_chat_and_is_true_or_false() -> None:
    assert refusal(chat, echo=True)[0] == refusal(completion, echo=1)[0] == "echo"


@BOTH
def test_a_service_tier_is_a_lane_and_the_answer_says_which(parse: Callable[..., Any]) -> None:
    for tier, lane, told in (
        (None, "normal", None),
        ("auto", "normal", "default"),
        ("default", "normal", "default"),
        ("flex", "batch", "flex"),
        ("priority", "interactive", "priority"),
        ("fast", "interactive", "priority"),
    ):
        call = parse(service_tier=tier)
        assert (call.lane, call.service_tier) == (lane, told)
        assert call.requests("x", "a tenant")[0].lane == lane
        assert call.requests("x", "a tenant")[0].tenant == "a tenant"
    for tier in ("scale", "x", 5, [], True):
        assert refusal(parse, service_tier=tier)[0] == "service_tier"


@BOTH
def test_a_caller_has_the_lanes_of_its_tier(parse: Callable[..., Any]) -> None:
    assert refusal(parse, lanes=("normal", "batch"), service_tier="priority")[0] == "service_tier"
    assert parse(lanes=("normal", "batch"), service_tier="flex").lane == "batch"
    assert parse(lanes=("batch",)).lane == parse(lanes=("batch",), service_tier="auto").lane == "batch"
    assert refusal(parse, lanes=("batch",), service_tier="default")[0] == "service_tier"


def test_a_timeout_shortens_the_deadline_of_the_service() -> None:
    own = Deadlines(queue_s=5.0, total_s=60.0)
    served = model(BYTES, deadlines=own)
    assert parse_completion({"prompt": "a"}, served).deadlines == own
    assert parse_completion({"prompt": "a", "timeout_s": 2}, served).requests("x")[0].deadlines == Deadlines(
        5.0, None, 2.0
    )
    assert parse_completion({"prompt": "a", "timeout_s": 90}, served).deadlines == own
    assert completion(timeout_s=90).deadlines == Deadlines(total_s=90.0)
    for wrong in (0, -1, 1e9, "5", True):
        assert refusal(completion, timeout_s=wrong)[0] == "timeout_s"


@BOTH
def test_a_receipt_is_asked_for_and_told(parse: Callable[..., Any]) -> None:
    for stream in (False, True):
        call = parse(receipt=True, stream=stream)
        answer = Answer(call, SUBWORD)
        (request,) = answer.requests
        assert request.wants_receipt and not parse().requests("x")[0].wants_receipt
        answer.take(Event(request.id, (97,), "a", (), "length", 1, receipt={"seed": 3}))
        choice = answer.chunks()[-1]["choices"][0] if stream else answer.reply().body["choices"][0]
        assert choice["receipt"] == {"seed": 3}
    assert refusal(parse, receipt="yes")[0] == "receipt"


def test_the_body_chooses_among_models() -> None:
    both = {name: Served(name, BYTES, CONTEXT) for name in ("one", "two")}
    assert choose_model({"model": "two"}, both).name == "two"
    assert choose_model({}, both).name == choose_model([], both).name == choose_model({"model": 5}, both).name == "one"
    with pytest.raises(RequestError, match="one of 'one', 'two'"):
        choose_model({"model": "three"}, both)


def test_what_is_allowed_is_each_prompt_once_and_every_answer() -> None:
    call = completion(prompt=["ab", "abc"], n=2, max_tokens=7)
    assert (call.num_prompt_tokens, call.num_allowed_tokens) == (5, 5 + 4 * 7)


TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "d", "parameters": {"type": "object"}, "strict": True},
}
SHOWING = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{{ '=' ~ m.tool_call_id if m.tool_call_id else '' }}{% endfor %}"
)
CALLS = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": [1, "é"]}'}}]
WITH_CALLS = [*HELLO, {"role": "assistant", "content": None, "tool_calls": CALLS}]
WITH_RESULT = [*WITH_CALLS, {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}]}]


def shown(**body: Any) -> str:
    tokenizer = with_template(SHOWING)
    return tokenizer.decode(chat(tokenizer, **body).choices[0].prompt)


def test_tools_and_their_calls_reach_the_template() -> None:
    assert shown() == shown(tools=[]) == shown(tools=[TOOL], tool_choice="none") == "hello"
    assert shown(tools=[TOOL, TOOL], tool_choice="auto") == shown(tools=[TOOL, TOOL]) == "look;look;hello"
    assert shown(messages=WITH_RESULT) == 'hello(c1 look {"x": [1, "é"]})<|tool|>ok=c1'


def changed(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**TOOL["function"], **function}}


def called(**function: Any) -> list[Any]:
    return [
        *HELLO,
        {"role": "assistant", "tool_calls": [{**CALLS[0], "function": {**CALLS[0]["function"], **function}}]},
    ]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": TOOL}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": ["look"]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        ({"tools": [TOOL, TOOL | {"x": 1}]}, "tools[1].x"),
        ({"tools": [changed(name="a b")]}, "tools[0].function.name"),
        ({"tools": [changed(description=1)]}, "tools[0].function.description"),
        ({"tools": [changed(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [changed(parameters=deep(40))]}, "tools[0]"),
        ({"tools": [changed(strict=1)]}, "tools[0].function.strict"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": TOOL}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"messages": called(name="")}, "messages[1].tool_calls[0].function.name"),
        ({"messages": called(arguments="{")}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": called(arguments="[1]")}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": called(arguments='{"a": NaN}')}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": called(arguments='{"a":' * 50 + "1" + "}" * 50)}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": called(arguments="[" * 100_000)}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": called(more=1)}, "messages[1].tool_calls[0].function.more"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0]"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": CALLS * 129}]}, "messages[1].tool_calls"),
        ({"messages": [*HELLO, {"role": "assistant", "content": None}]}, "messages[1].content"),
        ({"messages": [*HELLO, {"role": "user", "content": "a", "tool_calls": CALLS}]}, "messages[1].tool_calls"),
        ({"messages": [*HELLO, {"role": "tool", "content": "a"}]}, "messages[1].tool_call_id"),
        ({"messages": [*HELLO, {"role": "user", "content": "a", "tool_call_id": "c"}]}, "messages[1].tool_call_id"),
    ],
)
def test_tools_of_another_shape_are_refused_where_they_are_wrong(body: Any, field: str) -> None:
    assert refusal(chat, **body)[0] == field


def test_parsing_needs_neither_jax_nor_the_grammar_library() -> None:
    code = "import sys, jaxml.serve.endpoints; print([m for m in ('jax', 'llguidance') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
