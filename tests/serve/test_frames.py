"""A frame holds what was put in, and nothing but plain values of a bounded size gets out of one."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.errors import QueueFullError, RequestError
from jaxml.infer.request import LANES, Constraint, Deadlines, Event, Request, Sampling, TokenLogprob
from jaxml.serve import frames

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
# Events are made from these inside the tests: what checks the types of their fields draws random numbers of its own.
COUNTS = st.integers(0, 2**32 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
MAYBE = st.none() | FLOATS
LOGPROBS = st.tuples(COUNTS, st.floats(allow_nan=False), st.lists(st.tuples(COUNTS, FLOATS), max_size=2))
JSON = st.dictionaries(
    st.text(), st.none() | st.booleans() | COUNTS | FLOATS | st.text() | st.lists(COUNTS), max_size=3
)
EVENTS = st.fixed_dictionaries(
    {
        "tokens": st.lists(COUNTS, max_size=4),
        "text": st.text(max_size=5),
        "logprobs": st.lists(LOGPROBS, max_size=2),
        "finish_reason": st.sampled_from([None, "stop", "length", "error"]),
        "num_tokens": COUNTS,
        "error": st.sampled_from([None, "deadline", "internal"]),
        "detail": st.text(max_size=5),
        "queue_s": MAYBE,
        "num_cached": COUNTS,
        "prompt_logprobs": st.lists(LOGPROBS, max_size=2),
        "embedding": st.lists(FLOATS, max_size=3),
        "receipt": st.none() | JSON,
    }
)
SAMPLINGS = st.fixed_dictionaries(
    {
        **{name: st.none() | COUNTS for name in ("max_tokens", "seed", "num_logprobs", "num_prompt_logprobs")},
        **dict.fromkeys(("min_tokens", "top_k"), COUNTS),
        **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), FLOATS),
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), FLOATS),
        "stop": st.lists(st.text(max_size=3), max_size=2),
        "stop_token_ids": st.lists(COUNTS, max_size=2),
        "ignore_eos": st.booleans(),
        "logit_bias": st.lists(st.tuples(COUNTS, FLOATS), max_size=3),
        "constraint": st.none() | st.tuples(st.sampled_from(["json_schema", "regex", "choice"]), st.text(max_size=5)),
    }
)
REQUESTS = st.fixed_dictionaries(
    {
        "id": st.text(),
        "prompt": st.lists(COUNTS, max_size=4),
        "sampling": SAMPLINGS,
        "lane": st.sampled_from(LANES),
        "tenant": st.text(),
        "deadlines": st.tuples(MAYBE, MAYBE, MAYBE),
        "wants_embedding": st.booleans(),
        "wants_receipt": st.booleans(),
    }
)


def logprobs_of(drawn: list[tuple[Any, ...]]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, logprob, tuple(top)) for token, logprob, top in drawn)


def event_of(drawn: dict[str, Any]) -> Event:
    logprobs = {name: logprobs_of(drawn[name]) for name in ("logprobs", "prompt_logprobs")}
    return Event("a", **{**drawn, **logprobs, **{name: tuple(drawn[name]) for name in ("tokens", "embedding")}})


def request_of(drawn: dict[str, Any]) -> Request:
    sampling = {name: tuple(item) if isinstance(item, list) else item for name, item in drawn["sampling"].items()}
    sampling["constraint"] = sampling["constraint"] and Constraint(*sampling["constraint"])
    made = {"sampling": Sampling(**sampling), "deadlines": Deadlines(*drawn["deadlines"])}
    return Request(**{**drawn, **made, "prompt": tuple(drawn["prompt"])})


def read(content: bytes) -> list[Any]:
    """All messages in a stream of bytes."""

    async def all_of_them() -> list[Any]:
        reader = asyncio.StreamReader()
        reader.feed_data(content)
        reader.feed_eof()
        messages = []
        while (message := await frames.read_message(reader)) is not None:
            messages.append(message)
        return messages

    return asyncio.run(all_of_them())


def after_a_trip(value: Any) -> Any:
    return read(frames.pack({"value": value}))[0]["value"]


@given(st.lists(st.dictionaries(st.text(), PLAIN, max_size=3), max_size=3))
def test_messages_come_out_as_they_went_in_and_in_their_order(messages: list[dict[str, Any]]) -> None:
    assert read(b"".join(frames.pack(message) for message in messages)) == messages


@given(EVENTS)
def test_an_event_survives_the_trip(drawn: dict[str, Any]) -> None:
    event = event_of(drawn)
    assert frames.event_from_plain(after_a_trip(frames.event_to_plain(event))) == event


@given(REQUESTS)
def test_a_request_survives_the_trip(drawn: dict[str, Any]) -> None:
    request = request_of(drawn)
    assert frames.request_from_plain(after_a_trip(frames.request_to_plain(request))) == request


@given(EVENTS, REQUESTS)
def test_the_laws_above_draw_every_field(event: dict[str, Any], request: dict[str, Any]) -> None:
    """A field that is added to what crosses has to be added to what is drawn."""
    assert {"id", *event} == {field.name for field in dataclasses.fields(Event)}
    assert set(request) == {field.name for field in dataclasses.fields(Request)}
    assert set(request["sampling"]) == {field.name for field in dataclasses.fields(Sampling)}


def test_an_event_carries_only_what_it_says() -> None:
    assert frames.event_to_plain(Event("a", (1,), "b", num_tokens=1)) == {
        "id": "a",
        "tokens": (1,),
        "text": "b",
        "num_tokens": 1,
    }


@given(st.lists(EVENTS, min_size=1, max_size=5))
def test_joined_events_say_what_they_said_one_by_one(drawn: list[dict[str, Any]]) -> None:
    events = list(map(event_of, drawn))
    joined = frames.join_events(events)
    assert joined.text == "".join(event.text for event in events)
    assert joined.tokens == tuple(token for event in events for token in event.tokens)
    assert joined.logprobs == tuple(item for event in events for item in event.logprobs)
    for name in ("queue_s", "num_cached", "prompt_logprobs"):
        assert getattr(joined, name) == getattr(events[0], name), "said by the first event alone"
    for name in ("id", "num_tokens", "finish_reason", "error", "detail", "embedding", "receipt"):
        assert getattr(joined, name) == getattr(events[-1], name)


@pytest.mark.parametrize("kind", [RequestError, QueueFullError])
def test_a_refusal_is_raised_with_its_faults_on_the_other_side(kind: type[RequestError]) -> None:
    error = kind("prompt", expected="a", got="b", todo="c")
    back = frames.refusal_from_plain(after_a_trip(frames.refusal_to_plain(error)))
    assert type(back) is kind and back.faults == error.faults


def test_a_frame_that_announces_more_than_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(frames.FrameError, match=f"got: +{frames.MAX_FRAME_BYTES + 1} bytes"):
        read(struct.pack(">I", frames.MAX_FRAME_BYTES + 1))


def test_a_message_above_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100)
    with pytest.raises(frames.FrameError):
        frames.pack({"text": "x" * 100})


@pytest.mark.parametrize(
    "body",
    [
        msgpack.packb([1, 2]),
        msgpack.packb({1: 2}),
        msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
        b"\xc1",
        msgpack.packb({}) + b"more",
        b"\xa1\xff",
    ],
)
def test_anything_but_one_map_of_plain_values_is_refused(body: bytes) -> None:
    with pytest.raises(frames.FrameError):
        read(struct.pack(">I", len(body)) + body)


@given(st.integers(1, 20))
def test_a_stream_that_ends_inside_a_frame_is_an_error_and_between_frames_it_is_not(length: int) -> None:
    frame = frames.pack({"text": "some text that is long"})
    assert len(read(frame)) == 1
    with pytest.raises(frames.FrameError, match="cut off"):
        read(frame[:length])


def test_a_number_that_msgpack_cannot_hold_is_an_error_of_ours() -> None:
    with pytest.raises(frames.FrameError, match="64 bits"):
        frames.pack({"seed": 10**30})
