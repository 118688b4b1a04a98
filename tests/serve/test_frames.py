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
from jaxml.infer.request import Event, Request, Sampling, TokenLogprob
from jaxml.serve import frames

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
# Events are made from these inside the tests: what checks the types of their fields draws random numbers of its own.
LOGPROBS = st.tuples(st.integers(0, 999), st.floats(-100, 0), st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 0))))
EVENTS = st.tuples(
    st.lists(st.integers(0, 999), max_size=4), st.text(max_size=5), st.lists(LOGPROBS, max_size=2), st.integers(0, 99)
)


def event_of(drawn: tuple[Any, ...]) -> Event:
    tokens, text, logprobs, num_tokens = drawn
    items = tuple(TokenLogprob(token, logprob, tuple(top)) for token, logprob, top in logprobs)
    return Event("a", tuple(tokens), text, items, None, num_tokens)


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
def test_an_event_survives_the_trip_and_holds_all_of_it(drawn: tuple[Any, ...]) -> None:
    event = event_of(drawn)
    assert frames.event_to_plain(event) == dataclasses.asdict(event)
    assert frames.event_from_plain(after_a_trip(frames.event_to_plain(event))) == event


def test_a_request_survives_the_trip() -> None:
    sampling = Sampling(max_tokens=3, temperature=0.5, seed=2**32 - 1, stop=("a", "b"), stop_token_ids=(1, 2))
    request = Request("id", (1, 2, 3), sampling)
    assert frames.request_from_plain(after_a_trip(frames.request_to_plain(request))) == request


@given(st.lists(EVENTS, min_size=1, max_size=5))
def test_joined_events_say_what_they_said_one_by_one(drawn: list[tuple[Any, ...]]) -> None:
    events = list(map(event_of, drawn))
    joined = frames.join_events(events)
    assert joined.text == "".join(event.text for event in events)
    assert joined.tokens == tuple(token for event in events for token in event.tokens)
    assert joined.logprobs == tuple(item for event in events for item in event.logprobs)
    assert (joined.num_tokens, joined.finish_reason) == (events[-1].num_tokens, events[-1].finish_reason)


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
