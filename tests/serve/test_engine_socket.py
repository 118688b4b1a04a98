"""Both ends of the socket in one process: what is asked is answered, what is left is cancelled, what is lost is said."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxml.errors import JaxmlError, QueueFullError, RequestError
from jaxml.infer.request import Constraint, Event, Request, Sampling, TokenLogprob
from jaxml.serve import engine_client, engine_server
from jaxml.serve.engine_client import Call, EngineClient, WorkerLostError
from jaxml.serve.engine_server import EngineServer, Hosted, Outbox
from jaxml.serve.frames import event_from_plain, pack, read_message, request_to_plain
from tests.serve.small_engine import SmallEngine, answer_of

FOREVER = Sampling(max_tokens=50_000)


class Running:
    """An engine (and a second one, `other`), their server, and clients of it."""

    other: SmallEngine

    def __init__(self, socket: str, server: EngineServer, engine: SmallEngine):
        self.socket, self.server, self.engine = socket, server, engine

    def client(self) -> EngineClient:
        return EngineClient(self.socket)

    async def settled(self, **counts: int) -> dict[str, int]:
        """The engine's counts once they are as expected (a second at most)."""
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            stats = self.engine.stats()
            if all(stats[name] == value for name, value in counts.items()):
                return stats
            await asyncio.sleep(0.002)
        raise AssertionError(f"expected {counts}, got {self.engine.stats()}")


@asynccontextmanager
async def running(directory: Path, **options: Any) -> AsyncIterator[Running]:
    server = EngineServer()
    engine = SmallEngine(server.emit, **options)
    socket = str(directory / "s")
    other = SmallEngine(server.emit, max_batch=1, max_queue=1)
    await server.listen(socket, [Hosted(engine, {"name": "small"}), Hosted(other, {"name": "other"})])
    engine.start()
    other.start()
    here = Running(socket, server, engine)
    here.other = other
    try:
        yield here
    finally:
        await server.close()
        engine.close()
        other.close()


Test = Callable[[Running], Coroutine[Any, Any, None]]


def drive(test: Test, tmp_path: Path, **options: Any) -> None:
    """Run an asynchronous test against a running engine, for ten seconds at most."""

    async def whole() -> None:
        async with running(tmp_path, **options) as here:
            await asyncio.wait_for(test(here), 10)

    asyncio.run(whole())


def request(prompt: str = "hello", sampling: Sampling = Sampling(max_tokens=5)) -> Request:
    return Request(uuid.uuid4().hex, tuple(prompt.encode()), sampling)


async def text_of(call: Call) -> str:
    return "".join([event.text async for event in call])


def test_many_calls_at_once_get_each_its_own_answer(tmp_path: Path) -> None:
    async def test(here: Running) -> None:
        clients = [here.client(), here.client()]
        requests = [request(f"prompt {number}", Sampling(max_tokens=3 + number)) for number in range(12)]
        calls = await asyncio.gather(*(clients[i % 2].start([one]) for i, one in enumerate(requests)))
        assert await asyncio.gather(*map(text_of, calls)) == list(map(answer_of, requests))
        assert len(here.server._connections) == 2, "concurrent first calls share the connection of their process"
        await asyncio.gather(*(client.close() for client in clients))

    drive(test, tmp_path)


def test_requests_of_one_call_end_each_by_itself(tmp_path: Path) -> None:
    async def test(here: Running) -> None:
        client = here.client()
        short, long = request("a", Sampling(max_tokens=2)), request("b", Sampling(max_tokens=9))
        texts = {short.id: "", long.id: ""}
        async for event in await client.start([short, long]):
            texts[event.id] += event.text
        assert texts == {short.id: answer_of(short), long.id: answer_of(long)}
        await client.close()

    drive(test, tmp_path)


def test_closing_a_call_frees_its_place_while_decoding_in_prefill_and_in_the_queue(tmp_path: Path) -> None:
    async def test(here: Running) -> None:
        client = here.client()
        decoding = await client.start([request("a", FOREVER)])
        async for _ in decoding:
            break
        in_prefill = await client.start([request("b" * 16 * 5000, FOREVER)])
        await here.settled(running=2, queued=0)
        queued = await client.start([request("c", FOREVER)])
        await here.settled(running=2, queued=1)
        for call, left in ((queued, (2, 0)), (in_prefill, (1, 0)), (decoding, (0, 0))):
            call.close()
            call.close()
            await here.settled(running=left[0], queued=left[1])
            assert [event async for event in call] == []
        assert not client._calls
        await client.close()

    drive(test, tmp_path, max_batch=2)


def test_a_connection_that_closes_cancels_everything_that_was_asked_through_it(tmp_path: Path) -> None:
    async def test(here: Running) -> None:
        leaver, stayer = here.client(), here.client()
        for number in range(5):
            await leaver.start([request(str(number), FOREVER)])
        stays = await stayer.start([request("x", Sampling(max_tokens=200))])
        await leaver.close()
        await here.settled(cancelled=5, queued=0)
        assert len(await text_of(stays)) == 200
        await stayer.close()

    drive(test, tmp_path)


def test_a_task_that_is_cancelled_while_it_submits_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test(here: Running) -> None:
        client = here.client()
        await client.cards()
        starting = asyncio.create_task(client.start([request("a", FOREVER)]))
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await here.settled(running=0, queued=0)
        assert not client._calls and not client._replies
        await client.close()

    drive(test, tmp_path)


def test_refusals_are_raised_and_refuse_the_whole_call(tmp_path: Path) -> None:
    async def test(here: Running) -> None:
        client = here.client()
        with pytest.raises(RequestError, match="temperature"):
            await client.start([request("a", FOREVER), request("b", Sampling(temperature=-1.0))])
        with pytest.raises(QueueFullError):
            await client.start([request(str(number), FOREVER) for number in range(9)])
        await here.settled(running=0, queued=0)
        assert not client._calls
        assert await text_of(await client.start([request()])) == answer_of(request())
        await client.close()

    drive(test, tmp_path, max_batch=2, max_queue=4)


def test_the_server_itself_takes_back_what_it_accepted_before_a_refusal(tmp_path: Path) -> None:
    async def test(here: Running) -> None:
        reader, writer = await asyncio.open_unix_connection(here.socket)
        asked = [request("a", FOREVER), request("b", Sampling(temperature=-1.0))]
        writer.write(
            pack({"op": "submit", "call": 7, "model": "", "requests": [request_to_plain(one) for one in asked]})
        )
        assert (await read_message(reader) or {})["op"] == "hello"
        refused = await read_message(reader)
        assert refused is not None and (refused["op"], refused["call"]) == ("refused", 7)
        await here.settled(running=0, queued=0)
        assert not here.server._owners
        writer.transport.abort()

    drive(test, tmp_path)


def test_each_model_has_a_card_stats_and_answers_of_its_own(tmp_path: Path) -> None:
    async def test(here: Running) -> None:
        client = here.client()
        assert [card["name"] for card in await client.cards()] == ["small", "other"]
        first, second = request("a", FOREVER), request("b", FOREVER)
        calls = [await client.start([first]), await client.start([second], "other")]
        await here.settled(running=1)
        while not (stats := await client.stats())["other"]["running"]:
            await asyncio.sleep(0.005)
        assert [stats[name]["running"] for name in ("small", "other")] == [1, 1]
        assert stats["other"]["free_places"] == 0
        calls[1].close()
        await asyncio.sleep(0)
        short = request("c")
        assert await text_of(await client.start([short], "other")) == answer_of(short)
        assert here.other.stats()["cancelled"] == 1 and here.engine.stats()["running"] == 1
        await client.close()

    drive(test, tmp_path)


CONSTRAINED = Sampling(max_tokens=5, constraint=Constraint("regex", "a*"))


def test_a_grammar_that_takes_long_to_compile_holds_up_nobody(tmp_path: Path) -> None:
    async def test(here: Running) -> None:
        may_go_on = threading.Event()
        submit = here.engine.submit

        def slow(request: Request) -> None:
            if request.sampling.constraint is not None:
                assert may_go_on.wait(5)
            submit(request)

        here.engine.submit = slow  # type: ignore[method-assign]
        client = here.client()
        constrained = request("a", CONSTRAINED)
        starting = asyncio.create_task(client.start([constrained]))
        await asyncio.sleep(0.01)
        plain = request()
        assert await text_of(await client.start([plain])) == answer_of(plain)
        assert not starting.done()
        left = asyncio.create_task(client.start([request("b", CONSTRAINED)]))
        await asyncio.sleep(0.01)
        left.cancel()
        may_go_on.set()
        assert await text_of(await starting) == "aaaaa"
        await here.settled(running=0, queued=0, accepted=3, cancelled=1)
        assert not here.server._owners and not here.server._submitting
        await client.close()

    drive(test, tmp_path)


def test_what_the_engine_raises_unexpectedly_refuses_one_call_and_tells_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(here: Running) -> None:
        submit = here.engine.submit

        def broken(request: Request) -> None:
            if request.prompt == tuple(b"confidential"):
                raise ValueError(bytes(request.prompt).decode())
            submit(request)

        here.engine.submit = broken  # type: ignore[method-assign]
        client = here.client()
        neighbour = await client.start([one := request("x", Sampling(max_tokens=50))])
        with pytest.raises(JaxmlError, match="ValueError") as refused:
            await client.start([request("confidential")])
        assert "confidential" not in str(refused.value) + caplog.text
        assert await text_of(neighbour) == answer_of(one)
        await client.close()

    drive(test, tmp_path)


def test_when_the_worker_goes_every_call_is_told_at_once_and_later_ones_are_refused(tmp_path: Path) -> None:
    async def test(here: Running) -> None:
        client = here.client()
        calls = [await client.start([request("a", FOREVER), request("b", FOREVER)]) for _ in range(2)]
        await here.server.close()
        for call in calls:
            last = [event async for event in call if event.finish_reason is not None]
            assert [event.finish_reason for event in last] == ["error", "error"] and call.is_lost
        Path(here.socket).unlink(missing_ok=True)
        with pytest.raises(WorkerLostError):
            await client.start([request()])
        with pytest.raises(WorkerLostError):
            await client.stats()

    drive(test, tmp_path)


def test_an_engine_error_ends_one_request_and_not_its_neighbour(tmp_path: Path) -> None:
    async def test(here: Running) -> None:
        client = here.client()
        bad, good = await client.start([request("\r")]), await client.start([request()])
        (only,) = [event async for event in bad]
        assert (only.finish_reason, only.error, bad.is_lost) == ("error", "internal", False)
        assert await text_of(good) == answer_of(request())
        await client.close()

    drive(test, tmp_path)


def test_a_reader_that_does_not_read_stops_neither_the_engine_nor_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The idle connection is closed when too much is unread for it; the neighbour's answer is whole."""
    monkeypatch.setattr(engine_server, "MAX_UNREAD", 3000)

    async def test(here: Running) -> None:
        _, writer = await asyncio.open_unix_connection(here.socket, limit=1)
        idle = [request_to_plain(request(str(number), FOREVER)) for number in range(3)]
        writer.write(pack({"op": "submit", "call": 0, "model": "", "requests": idle}))
        await here.settled(running=3)
        client = here.client()
        one = request("x", Sampling(max_tokens=300))
        assert await text_of(await client.start([one])) == answer_of(one)
        await here.settled(running=0, cancelled=3)
        writer.transport.abort()
        await client.close()

    drive(test, tmp_path, step_s=1e-4)


def test_a_reader_that_lags_gets_the_same_text_in_fewer_frames(tmp_path: Path) -> None:
    async def test(here: Running) -> None:
        reader, writer = await asyncio.open_unix_connection(here.socket, limit=64)
        one = request("slow", Sampling(max_tokens=40, num_logprobs=20))
        writer.write(pack({"op": "submit", "call": 0, "model": "", "requests": [request_to_plain(one)]}))
        texts: list[str] = []
        done = False
        while not done:
            message = await read_message(reader)
            assert message is not None
            for value in message.get("events", []):
                texts.append(event_from_plain(value).text)
                done = "finish_reason" in value
            if len(texts) == 1:
                time.sleep(0.02)  # The loop itself is held up: what the engine makes meanwhile arrives together.
        assert "".join(texts) == answer_of(one)
        writer.transport.abort()

    drive(test, tmp_path)


def test_an_outbox_joins_by_request_and_keeps_replies_first() -> None:
    outbox = Outbox()
    for index in range(3):
        outbox.add(Event("a", (index,), str(index), num_tokens=index + 1))
    outbox.add(Event("b", (9,), "9", num_tokens=1))
    outbox.reply({"op": "accepted", "call": 1})
    accepted, events = outbox.take()
    assert accepted == {"op": "accepted", "call": 1}
    assert [(event["id"], event["text"], event["num_tokens"]) for event in events["events"]] == [
        ("a", "012", 3),
        ("b", "9", 1),
    ]
    assert outbox.take() == [] and outbox.unread == 0
    logprob = TokenLogprob(1, -0.5, ((1, -0.5),))
    outbox.add(Event("a", (1,), "x", (logprob,), prompt_logprobs=(logprob, logprob), embedding=(0.5, 0.5)))
    assert outbox.unread == 1 + 1 + 3 * 2 + 2
    outbox.drop("a")
    assert outbox.take() == []


def test_a_call_that_nobody_reads_holds_at_most_a_bounded_number_of_events() -> None:
    call = Call(EngineClient("nowhere"), ["a", "b"])
    for index in range(1000):
        call.take(Event("ab"[index % 2], (index,), str(index % 10), num_tokens=index // 2 + 1))
    assert len(call._waiting) <= engine_client.MAX_WAITING + 2
    for id in "ab":
        call.take(Event(id, finish_reason="length", num_tokens=500))

    async def texts() -> dict[str, str]:
        texts = {"a": "", "b": ""}
        async for event in call:
            texts[event.id] += event.text
        return texts

    assert asyncio.run(texts()) == {"a": "02468" * 100, "b": "13579" * 100}


def test_garbage_on_the_socket_closes_that_connection_only(tmp_path: Path) -> None:
    async def test(here: Running) -> None:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", pack({"op": "unknown"}), pack({"op": "submit"})):
            reader, writer = await asyncio.open_unix_connection(here.socket)
            writer.write(garbage)
            assert await reader.read(-1) != b"", "the greeting"
            writer.transport.abort()
        client = here.client()
        assert await text_of(await client.start([request()])) == answer_of(request())
        await client.close()

    drive(test, tmp_path)
