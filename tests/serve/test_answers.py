"""Answers have OpenAI's shapes, whole and streamed; the two say the same; errors are told and never silent."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai.types
import openai.types.chat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.errors import ConfigError, DeviceError, Fault, QueueFullError, RequestError
from jaxml.infer.request import Event, Sampling, TokenLogprob
from jaxml.inputs.tokenizers import ByteTokenizer, Tokenizer
from jaxml.serve.answers import DONE, Answer, sse
from jaxml.serve.errors import Reply, error_object, error_reply
from jaxml.serve.requests import Choice, CompletionCall, UnknownModelError
from jaxml.serve.token_names import TokenNames, finite
from tests.infer.test_text import sentencepiece
from tests.serve.openai_schema import Schemas

BYTES = ByteTokenizer()
SMILE = tuple("😀".encode())


@pytest.fixture(scope="module")
def schemas(assets: Path) -> Schemas:
    return Schemas(assets / "openai-openapi" / "openapi.subset.json")


def call(
    *,
    is_chat: bool = False,
    stream: bool = False,
    prompts: int = 1,
    n: int = 1,
    logprobs: int | None = None,
    usage: bool = False,
) -> CompletionCall:
    sampling = Sampling(max_tokens=50, num_logprobs=logprobs)
    choices = tuple(Choice((65,) * (prompt + 1), sampling) for prompt in range(prompts) for _ in range(n))
    return CompletionCall("shk", choices, n, stream, usage, is_chat)


def answer(tokenizer: Tokenizer = BYTES, **fields: Any) -> Answer:
    return Answer(call(**fields), tokenizer, id="x", created=1_700_000_000)


def events(answer: Answer, index: int, pieces: list[tuple[tuple[int, ...], str]], reason: str = "stop") -> list[Event]:
    """Events of a choice from (tokens, text); with log-probabilities if the call wants them."""
    num_logprobs = answer.call.choices[index].sampling.num_logprobs
    made, count = [], 0
    for number, (tokens, text) in enumerate(pieces):
        count += len(tokens)
        logprobs = () if num_logprobs is None else tuple(scored(token, num_logprobs) for token in tokens)
        finish = reason if number == len(pieces) - 1 else None
        made.append(Event(answer.requests[index].id, tokens, text, logprobs, finish, count))
    return made


def counts(prompt: int, answer: int, cached: int = 0) -> dict[str, Any]:
    told = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return {**told, "prompt_tokens_details": {"cached_tokens": cached}}


def scored(token: int, num_top: int) -> TokenLogprob:
    return TokenLogprob(token, -0.25, tuple(((token + i) % 256, -0.25 - i) for i in range(num_top)))


HELLO = [((104,), "h"), ((105, SMILE[0]), "i"), (SMILE[1:3], ""), (SMILE[3:], "😀"), ((), "")]


def streamed(answer: Answer, every: list[Event]) -> list[dict[str, Any]]:
    chunks = answer.opening()
    for event in every:
        answer.take(event)
        chunks += answer.chunks()
    return chunks + answer.closing()


def whole(answer: Answer, every: list[Event]) -> dict[str, Any]:
    for event in every:
        answer.take(event)
    reply = answer.reply()
    assert reply.status == 200
    return json.loads(json.dumps(reply.body, allow_nan=False))


def test_a_whole_completion_has_the_published_shape(schemas: Schemas) -> None:
    for logprobs in (None, 0, 2):
        one = answer(logprobs=logprobs)
        body = whole(one, events(one, 0, HELLO))
        assert schemas.faults("CreateCompletionResponse", body) == []
        openai.types.Completion.model_validate(body)
        assert (body["id"], body["object"], body["created"], body["model"]) == (
            "x",
            "text_completion",
            1_700_000_000,
            "shk",
        )
        assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [(0, "hi😀", "stop")]
        assert body["usage"] == counts(1, 6)


def test_a_whole_chat_answer_has_the_published_shape(schemas: Schemas) -> None:
    for logprobs in (None, 0, 2):
        one = answer(is_chat=True, logprobs=logprobs)
        body = whole(one, events(one, 0, HELLO, "length"))
        assert schemas.faults("CreateChatCompletionResponse", body) == []
        openai.types.chat.ChatCompletion.model_validate(body)
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": "hi😀", "refusal": None}
        assert (body["object"], choice["finish_reason"]) == ("chat.completion", "length")


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("usage", [False, True])
def test_a_streamed_chat_has_the_published_shape(logprobs: int | None, usage: bool, schemas: Schemas) -> None:
    one = answer(is_chat=True, stream=True, n=2, usage=usage, logprobs=logprobs)
    chunks = streamed(one, events(one, 1, HELLO) + events(one, 0, HELLO[:1], "length"))
    for chunk in chunks:
        assert schemas.faults("CreateChatCompletionStreamResponse", chunk) == []
        openai.types.chat.ChatCompletionChunk.model_validate(chunk)
        assert (chunk["id"], chunk["created"], chunk["object"]) == ("x", 1_700_000_000, "chat.completion.chunk")
    of = {
        index: [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        for index in (0, 1)
    }
    for index, (text, reason) in enumerate([("h", "length"), ("hi😀", "stop")]):
        first, *middle, last = of[index]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all(set(choice["delta"]) == {"content"} and choice["delta"]["content"] for choice in middle)
        assert "".join(choice["delta"]["content"] for choice in middle) == text
        assert all(choice["finish_reason"] is None for choice in (first, *middle))
        assert (last["delta"], last["finish_reason"], last["logprobs"]) == ({}, reason, None)
    counted = [chunk for chunk in chunks if not chunk["choices"]]
    if usage:
        assert counted == chunks[-1:]
        assert chunks[-1]["usage"] == counts(1, 7)
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert counted == [] and all("usage" not in chunk for chunk in chunks)


def test_a_streamed_completion_has_the_shape_of_a_whole_one_in_pieces() -> None:
    one = answer(stream=True, usage=True, logprobs=1)
    chunks = streamed(one, events(one, 0, HELLO))
    for chunk in chunks:
        assert (chunk["id"], chunk["created"], chunk["object"]) == ("x", 1_700_000_000, "text_completion")
    *middle, last, usage = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in middle) == "hi😀"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in middle)
    assert last["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 7)


PIECES = st.lists(st.tuples(st.integers(0, 255), st.booleans()), max_size=12)


@given(
    pieces=PIECES,
    is_chat=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
    reason=st.sampled_from(["stop", "length"]),
)
def test_a_stream_says_what_the_whole_answer_says(
    pieces: list[tuple[int, bool]], is_chat: bool, logprobs: int | None, reason: str
) -> None:
    # Text lags behind its tokens, as where it is held back: it comes with the next event that says so.
    said, held = [], ""
    for token, is_shown in pieces:
        held += chr(97 + token % 26) if token % 3 else ""
        said.append(((token,), held if is_shown else ""))
        held = "" if is_shown else held
    said.append(((), held))
    one, other = answer(is_chat=is_chat, logprobs=logprobs), answer(is_chat=is_chat, logprobs=logprobs, stream=True)
    body = whole(one, events(one, 0, said, reason))["choices"][0]
    choices = [chunk["choices"][0] for chunk in streamed(other, events(other, 0, said, reason))]
    text = body["message"]["content"] if is_chat else body["text"]
    assert "".join(c["delta"].get("content", "") if is_chat else c["text"] for c in choices) == text
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [body["finish_reason"]] == [reason]
    every = [c["logprobs"] for c in choices if c["logprobs"] is not None]
    if logprobs is None:
        assert body["logprobs"] is None and not every
    elif is_chat:
        assert [item for part in every for item in part["content"]] == body["logprobs"]["content"]
    else:
        for key, values in body["logprobs"].items():
            assert [item for part in every for item in part[key]] == values
    inner = choices[is_chat:-1]
    assert all((c["delta"]["content"] if is_chat else c["text"]) or c["logprobs"] for c in inner), "an empty chunk"


def test_choices_of_several_prompts_are_numbered_by_prompt_and_counted_by_token() -> None:
    one = answer(prompts=2, n=2)
    every = [event for index in (3, 0, 2, 1) for event in events(one, index, [((97 + index,), chr(97 + index))])]
    body = whole(one, every)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert [len(request.prompt) for request in one.requests] == [1, 1, 2, 2]
    assert body["usage"] == counts(3, 4)


def test_it_is_finished_when_every_choice_is() -> None:
    one = answer(n=2)
    for index in (0, 1):
        assert not one.is_finished
        for event in events(one, index, HELLO):
            one.take(event)
    assert one.is_finished


def test_log_probabilities_of_a_completion_name_tokens_and_places() -> None:
    one = answer(logprobs=1)
    logprobs = whole(one, events(one, 0, HELLO))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "i", *[rf"bytes:\x{byte:02x}" for byte in SMILE]]
    assert logprobs["token_logprobs"] == [-0.25] * 6
    assert logprobs["text_offset"] == [0, 1, 2, 2, 2, 2]
    assert logprobs["top_logprobs"][0] == {"h": -0.25}


def test_the_chosen_token_is_among_the_likeliest_though_it_is_none_of_them() -> None:
    one = answer(logprobs=1)
    scores = (TokenLogprob(97, -5.0, ((98, -0.1),)),)
    one.take(Event(one.requests[0].id, (97,), "a", scores, "stop", 1))
    assert one.reply().body["choices"][0]["logprobs"]["top_logprobs"] == [{"b": -0.1, "a": -5.0}]


def test_log_probabilities_of_a_chat_give_bytes() -> None:
    one = answer(is_chat=True, logprobs=2)
    (first, *_, last) = whole(one, events(one, 0, HELLO))["choices"][0]["logprobs"]["content"]
    other = {"token": "i", "logprob": -1.25, "bytes": [105]}
    mine = {"token": "h", "logprob": -0.25, "bytes": [104]}
    assert first == {**mine, "top_logprobs": [mine, other]}
    assert (last["token"], last["bytes"]) == (rf"bytes:\x{SMILE[3]:02x}", [SMILE[3]])


def test_tokens_are_named_as_they_write_and_special_ones_as_they_are_spelt() -> None:
    names = TokenNames(sentencepiece())
    assert names[2] == ("</s>", None)
    assert names[266] == (" a", [32, 97])
    assert names[3 + 0xE2] == (r"bytes:\xe2", [0xE2])
    assert TokenNames(BYTES)[256] == ("<|endoftext|>", None)


def test_offsets_follow_the_text_that_is_shown_at_the_start_of_one() -> None:
    one = Answer(
        CompletionCall("shk", (Choice((1,), Sampling(num_logprobs=0)),), 1, False, False, False), sentencepiece()
    )
    scores = tuple(TokenLogprob(266, -1.0) for _ in range(3))
    one.take(Event(one.requests[0].id, (266,) * 3, "a a a", scores, "length", 3))
    assert one.reply().body["choices"][0]["logprobs"]["text_offset"] == [0, 1, 3]


@pytest.mark.parametrize("is_chat", [False, True])
def test_no_log_probability_is_infinite_or_no_number(is_chat: bool) -> None:
    one = answer(is_chat=is_chat, logprobs=2)
    scores = (TokenLogprob(97, -math.inf, ((98, math.nan), (99, -1e30))), TokenLogprob(98, 1e-9, ()))
    one.take(Event(one.requests[0].id, (97, 98), "ab", scores, "stop", 2))
    said = json.dumps(one.reply().body, allow_nan=False)
    # A completion names the chosen token among the likeliest too.
    assert said.count("-9999.0") == (3 if is_chat else 4)


@given(logprob=st.floats())
def test_a_finite_log_probability_stays_what_it_is(logprob: float) -> None:
    assert -9999.0 <= finite(logprob) <= 0.0
    if -9999.0 <= logprob <= 0.0:
        assert finite(logprob) == logprob


@pytest.mark.parametrize("is_chat", [False, True])
def test_an_error_in_mid_stream_is_told_and_every_open_choice_is_finished(is_chat: bool, schemas: Schemas) -> None:
    one = answer(is_chat=is_chat, stream=True, n=3)
    for event in events(one, 0, HELLO):
        one.take(event)
    one.take(events(one, 1, HELLO)[0])
    one.chunks()
    one.take(Event(one.requests[1].id, finish_reason="error", error="internal", detail="secret: /a/path"))
    error, *finishes = one.chunks()
    assert schemas.faults("ErrorResponse", error) == []
    assert error["error"]["type"] == "server_error"
    assert "secret" not in json.dumps(error)
    assert [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in finishes] == [
        (1, "error"),
        (2, "error"),
    ]
    assert one.is_finished
    assert one.failure is not None


def test_an_error_before_the_end_makes_the_whole_answer_an_error() -> None:
    one = answer(n=2)
    for event in events(one, 0, HELLO):
        one.take(event)
    one.take(Event(one.requests[1].id, finish_reason="error", error="internal", detail="secret"))
    reply = one.reply()
    assert (reply.status, "secret" in json.dumps(reply.body)) == (500, False)


def test_a_stream_can_be_ended_from_outside() -> None:
    one = answer(stream=True)
    late = Reply(504, error_object(504, "too late", code="timeout"))
    one.fail(late)
    assert one.chunks()[0] == late.body
    assert one.reply() == late


FAULTS = [Fault("temperature", "at least 0", "-1", "raise it"), Fault("n", "at least 1", "0", "raise it")]


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (RequestError.from_faults(FAULTS), 400, "invalid_request_error", "temperature", None),
        (
            UnknownModelError("model", expected="a", got="b", todo="c"),
            404,
            "invalid_request_error",
            "model",
            "model_not_found",
        ),
        (
            QueueFullError("the queue", expected="a place", got="none", todo="wait"),
            429,
            "rate_limit_error",
            None,
            "queue_full",
        ),
        (DeviceError("mesh", expected="8", got="1", todo="secret"), 500, "server_error", None, "internal_error"),
        (ConfigError("mesh", expected="8", got="1", todo="secret"), 500, "server_error", None, "internal_error"),
        (ValueError("secret"), 500, "server_error", None, "internal_error"),
    ],
)
def test_an_error_has_its_status_and_the_published_shape(
    error: Exception, status: int, kind: str, param: str | None, code: str | None, schemas: Schemas
) -> None:
    reply = error_reply(error)
    assert schemas.faults("ErrorResponse", reply.body) == []
    told = reply.body["error"]
    assert (reply.status, told["type"], told["param"], told["code"]) == (status, kind, param, code)
    assert "secret" not in json.dumps(reply.body)
    assert reply.headers == ({"Retry-After": "1"} if status == 429 else {})


def test_all_faults_are_told_in_one_line() -> None:
    message = error_reply(RequestError.from_faults(FAULTS)).body["error"]["message"]
    assert message == (
        "2 faults. (1) temperature: expected at least 0, got -1; raise it. (2) n: expected at least 1, got 0; raise it."
    )
    assert (
        error_reply(RequestError.from_faults(FAULTS[:1])).body["error"]["message"].startswith("temperature: expected")
    )


def test_an_event_of_a_stream_is_one_line_of_json() -> None:
    assert sse({"text": "é\n\u2028"}) == 'data: {"text": "é\\n\u2028"}\n\n'.encode()
    assert sse({"message": "\ud800"}).startswith(b'data: {"message": "')
    assert DONE == b"data: [DONE]\n\n"


def test_each_answer_has_an_id_of_its_own_and_the_time() -> None:
    ids = {Answer(call(is_chat=is_chat), BYTES).id for is_chat in (False, True, True)}
    assert len(ids) == 3
    assert {id.partition("-")[0] for id in ids} == {"cmpl", "chatcmpl"}
    assert Answer(call(), BYTES).created > 1_700_000_000


def test_requests_and_answers_need_neither_jax_nor_litserve() -> None:
    code = "import sys, jaxml.serve.answers, jaxml.inputs.chat; print([m for m in ('jax', 'litserve') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("deadline", 504, "deadline_exceeded"),
        ("lost", 503, "unavailable"),
        ("closed", 503, "unavailable"),
        ("constraint", 500, "constraint"),
        ("non_finite", 500, "non_finite"),
        ("stuck", 500, "stuck"),
        ("internal", 500, "internal_error"),
        (None, 500, "internal_error"),
    ],
)
def test_a_failure_of_the_engine_has_its_status_and_kind_whole_and_streamed(
    kind: Any, status: int, code: str, schemas: Schemas
) -> None:
    for stream in (False, True):
        one = answer(stream=stream, n=2)
        one.take(Event(one.requests[0].id, (97,), "a", (), None, 1))
        one.take(Event(one.requests[1].id, finish_reason="error", error=kind, detail="secret"))
        reply = one.reply()
        assert (reply.status, reply.body["error"]["code"], "Retry-After" in reply.headers) == (
            status,
            code,
            status == 503,
        )
        assert schemas.faults("ErrorResponse", reply.body) == [] and "secret" not in json.dumps(reply.body)
    said, error, *ends = one.chunks()
    assert said["choices"][0]["text"] == "a", "what came before is still told"
    assert error == reply.body and [end["choices"][0]["finish_reason"] for end in ends] == ["error", "error"]
    assert one.chunks() == []
