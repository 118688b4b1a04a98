"""A stream says the first token at once and then joins what comes within a window; it always ends, and cancels what it leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxml.infer.request import Event
from jaxml.serve.answers import Answer
from jaxml.serve.engine_client import Call, EngineClient
from jaxml.serve.gate import LEFT
from jaxml.serve.streams import follow, stream
from jaxml.serve.visit import Visit
from tests.serve.asking import BYTES, completion


class Asked:
    """An answer that is streamed, with its events given by hand. `cancelled`: ids that were given up."""

    def __init__(self, **body: Any):
        self.answer = Answer(completion(stream=True, **body), BYTES, id="x", created=1)
        client = EngineClient("/nowhere")
        self.cancelled: set[str] = set()
        client.forget = self.cancelled.update  # type: ignore[bad-assignment]
        self.call = Call(client, [request.id for request in self.answer.requests])
        self.visit = Visit({LEFT: asyncio.get_running_loop().create_future()})
        self.chunks = stream(self.answer, self.call, self.visit)
        self.num_tokens = 0

    def say(self, text: str, finish: Any = None, index: int = 0) -> None:
        self.num_tokens += 1
        event = Event(f"x-{index}", tuple(text.encode()), text, (), finish, self.num_tokens)
        self.call.take(event)

    async def next_texts(self) -> list[tuple[int, str]]:
        """(choice, text) of the events that go out next together."""
        sent = (await anext(self.chunks)).decode().split("\n\n")
        bodies = [json.loads(event.removeprefix("data: ")) for event in sent if event and event != "data: [DONE]"]
        return [(choice["index"], choice["text"]) for body in bodies for choice in body.get("choices", [])]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def test_the_first_token_goes_out_at_once_and_what_follows_within_a_window_as_one_chunk() -> None:
    async def test() -> None:
        asked = Asked()
        asked.say("a")
        assert await asked.next_texts() == [(0, "a")]
        for letter in "bcdefgh":
            asked.say(letter)
        assert await asked.next_texts() == [(0, "bcdefgh")]
        asked.say("i", "stop")
        assert await asked.next_texts() == [(0, "i"), (0, "")]
        with pytest.raises(StopAsyncIteration):
            await anext(asked.chunks)

    run(test)


def test_within_a_window_nothing_more_goes_out_while_tokens_come() -> None:
    async def test() -> None:
        asked = Asked()
        asked.say("a")
        await asked.next_texts()
        reading = asyncio.create_task(asked.next_texts())
        for letter in "bcd":
            asked.say(letter)
            for _ in range(5):
                await asyncio.sleep(0)
        assert not reading.done()
        assert await reading == [(0, "bcd")]
        await asked.chunks.aclose()

    run(test)


def test_one_choice_that_fails_ends_the_others_of_an_answer_that_is_not_streamed() -> None:
    async def test() -> None:
        asked = Asked(n=2)
        asked.call.take(Event("x-1", finish_reason="error", error="internal"))
        await follow(asked.answer, asked.call, asked.visit)
        assert asked.cancelled == {"x-0"} and asked.answer.failure is not None

    run(test)


def test_choices_that_speak_in_one_window_have_a_chunk_each() -> None:
    async def test() -> None:
        asked = Asked(n=2)
        for text, index in (("a", 0), ("b", 1), ("c", 0)):
            asked.say(text, index=index)
        assert await asked.next_texts() == [(0, "ac"), (1, "b")]
        asked.say("", "stop", 0)
        asked.say("", "length", 1)
        assert await asked.next_texts() == [(0, ""), (1, "")]

    run(test)


def test_a_stream_whose_reader_goes_cancels_its_requests() -> None:
    async def test() -> None:
        asked = Asked(n=2)
        asked.say("a")
        await asked.next_texts()
        await asked.chunks.aclose()
        assert asked.cancelled == {"x-0", "x-1"}

    run(test)


def test_a_stream_whose_client_has_left_just_ends() -> None:
    async def test() -> None:
        asked = Asked()
        asked.say("a")
        await asked.next_texts()
        asked.call.close()
        assert [chunk async for chunk in asked.chunks] == []

    run(test)


def test_a_lost_worker_ends_a_stream_with_an_error_and_done() -> None:
    async def test() -> None:
        asked = Asked()
        asked.say("a")
        await asked.next_texts()
        asked.call.lose()
        rest = b"".join([chunk async for chunk in asked.chunks]).decode()
        assert '"code": "unavailable"' in rest and '"finish_reason": "error"' in rest
        assert rest.endswith("data: [DONE]\n\n")

    run(test)


@given(pieces=st.lists(st.tuples(st.text(st.characters(codec="utf-8"), max_size=3), st.integers(0, 3)), max_size=8))
@settings(max_examples=15, deadline=None)
def test_whatever_is_said_in_whatever_pieces_a_stream_is_lines_of_json_that_join_to_it(
    pieces: list[tuple[str, int]],
) -> None:
    async def test() -> None:
        asked = Asked()

        async def speak() -> None:
            for text, pauses in pieces:
                for _ in range(pauses):
                    await asyncio.sleep(0)
                asked.say(text)
            asked.say("", "stop")

        speaking = asyncio.create_task(speak())
        sent = b"".join([chunk async for chunk in asked.chunks]).decode()
        await speaking
        events = sent.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(event.startswith("data: ") and "\n" not in event for event in events[:-1])
        choices = [json.loads(event[6:])["choices"][0] for event in events[:-2]]
        assert "".join(choice["text"] for choice in choices) == "".join(text for text, _ in pieces)
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]

    run(test)
