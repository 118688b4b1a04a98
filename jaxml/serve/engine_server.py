"""The worker's end of the socket: requests go to the engines, their events go out, one frame a step and connection.

Reads `infer.request` and `serve.frames`; `engine_loop` runs it beside the engines' threads. It knows neither LitServe nor
HTTP, so it is tested in-process. Everything here happens in one asyncio loop; only `emit` is called from other threads,
and a submission whose grammar has to be compiled goes to a thread of its own.

A connection is one API process. What it has not read yet is joined by request, so it never holds more than the answers
it asked for, and neither the engine nor another connection waits for it; one that is hopelessly behind is closed. A
closed connection cancels its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxml.errors import JaxmlError
from jaxml.infer.request import Event, Request
from jaxml.serve.frames import (
    PROTOCOL,
    FrameError,
    Message,
    event_to_plain,
    join_events,
    pack,
    read_message,
    refusal_to_plain,
    request_from_plain,
)

logger = logging.getLogger(__name__)

Emit = Callable[[list[Event]], None]

# Tokens and log-probability entries that one connection may leave unread, some tens of megabytes.
MAX_UNREAD = 2**20


@runtime_checkable
class EngineLike(Protocol):
    """What is used of `infer.engine.Engine`; the transport's tests bring a small one of their own."""

    def warm_up(self) -> object: ...
    def start(self) -> None: ...
    def close(self) -> None: ...
    def submit(self, request: Request) -> None: ...
    def cancel(self, id: str) -> None: ...
    def stats(self) -> Mapping[str, int | float]: ...


@dataclass(frozen=True)
class Hosted:
    """One model of a worker. card: plain values that say what it is; its `name` is what requests call it."""

    engine: EngineLike
    card: Message

    @property
    def name(self) -> str:
        return self.card["name"]


class Outbox:
    """What one connection has yet to be told: replies first, then the events, joined by request."""

    def __init__(self) -> None:
        self.unread = 0
        self._replies: list[Message] = []
        self._events: dict[str, list[Event]] = {}

    def reply(self, message: Message) -> None:
        self._replies.append(message)

    def add(self, event: Event) -> None:
        self._events.setdefault(event.id, []).append(event)
        entries = sum(1 + len(item.top) for items in (event.logprobs, event.prompt_logprobs) for item in items)
        self.unread += 1 + len(event.tokens) + len(event.embedding) + entries

    def drop(self, id: str) -> None:
        """Forget what a request that was cancelled would still have said."""
        self._events.pop(id, None)

    def take(self) -> list[Message]:
        """Everything, as messages in the order in which they go out; the outbox is empty afterwards."""
        messages, self._replies = self._replies, []
        if self._events:
            events = [event_to_plain(join_events(events)) for events in self._events.values()]
            messages.append({"op": "events", "events": events})
        self._events, self.unread = {}, 0
        return messages


class _Connection:
    def __init__(self, writer: asyncio.StreamWriter):
        self.writer = writer
        self.outbox = Outbox()
        self.wake = asyncio.Event()
        self.ids: set[str] = set()

    def reply(self, message: Message) -> None:
        self.outbox.reply(message)
        self.wake.set()


class EngineServer:
    """Serves engines on a unix socket, until `close`.

    `emit` is what each engine has to be built with; it may be called from any thread once `listen` was awaited.
    """

    def __init__(self) -> None:
        self._owners: dict[str, tuple[_Connection, EngineLike]] = {}
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._submitting: set[asyncio.Task[None]] = set()
        self._hosted: dict[str, Hosted] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Server | None = None

    def emit(self, events: list[Event]) -> None:
        """Takes the events of one step of an engine. Returns at once."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, events)

    async def listen(self, socket: str, hosted: Sequence[Hosted]) -> None:
        """Accept connections on `socket` (a path in a directory that only this user can enter).

        hosted: at least one, of different names; each connection is greeted with their cards.
        """
        self._loop = asyncio.get_running_loop()
        self._hosted = {each.name: each for each in hosted}
        self._server = await asyncio.start_unix_server(self._serve, path=socket)

    async def close(self) -> None:
        """Stop accepting, close every connection and cancel its requests."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections.values()):
            task.cancel()
        await asyncio.gather(*self._connections.values(), *self._submitting, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer)
        connection.reply({"op": "hello", "protocol": PROTOCOL, "cards": [each.card for each in self._hosted.values()]})
        sending = asyncio.create_task(self._send(connection))
        self._connections[connection] = sending
        receiving = asyncio.create_task(self._receive(connection, reader))
        try:
            await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, receiving):
                task.cancel()
            self._release(connection)
            for outcome in await asyncio.gather(sending, receiving, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, ConnectionError):
                    logger.error("closed a connection: %s: %s", type(outcome).__name__, outcome)

    async def _receive(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        while (message := await read_message(reader)) is not None:
            self._handle(connection, message)

    async def _send(self, connection: _Connection) -> None:
        """One frame for what is there; while the reader lags, what follows is joined in the outbox."""
        while True:
            await connection.wake.wait()
            connection.wake.clear()
            for message in connection.outbox.take():
                connection.writer.write(pack(message))
            await connection.writer.drain()

    def _handle(self, connection: _Connection, message: Message) -> None:
        op, call = message.get("op"), message.get("call")
        if op == "submit":
            engine = self._hosted[message["model"]].engine if message["model"] else self._first
            requests = [request_from_plain(item) for item in message["requests"]]
            self._claim(connection, engine, requests)
            if any(request.sampling.constraint is not None for request in requests):
                task = asyncio.create_task(self._submit_slowly(connection, engine, requests, call))
                self._submitting.add(task)
                task.add_done_callback(self._submitting.discard)
            else:
                with self._answering(connection, requests, call):
                    for request in requests:
                        engine.submit(request)
        elif op == "cancel":
            for id in message["ids"]:
                self._cancel(connection, id)
        elif op == "stats":
            stats = {name: dict(each.engine.stats()) for name, each in self._hosted.items()}
            connection.reply({"op": "stats", "call": call, "stats": stats})
        else:
            raise FrameError("a message", expected="submit, cancel or stats", got=repr(op)[:40], todo="mend the client")

    def _claim(self, connection: _Connection, engine: EngineLike, requests: list[Request]) -> None:
        for request in requests:
            if request.id in self._owners:
                raise FrameError("a request's id", expected="a new one", got="one that runs", todo="mend the client")
            self._owners[request.id] = (connection, engine)
            connection.ids.add(request.id)

    async def _submit_slowly(
        self, connection: _Connection, engine: EngineLike, requests: list[Request], call: Any
    ) -> None:
        """In a thread, because a grammar is compiled; one that was cancelled meanwhile is cancelled again."""
        with self._answering(connection, requests, call):
            for request in requests:
                await asyncio.to_thread(engine.submit, request)
                if request.id not in connection.ids:
                    engine.cancel(request.id)

    @contextlib.contextmanager
    def _answering(self, connection: _Connection, requests: list[Request], call: Any) -> Iterator[None]:
        """All of them or none: when one is refused inside, those that were accepted before are cancelled."""
        try:
            yield
        except Exception as error:  # Whatever it is, it is this call's alone.
            for request in requests:
                self._cancel(connection, request.id)
            connection.reply({"op": "refused", "call": call, **refusal_to_plain(_as_ours(error))})
        else:
            connection.reply({"op": "accepted", "call": call})

    def _cancel(self, connection: _Connection, id: str) -> None:
        if id in connection.ids:
            connection.ids.discard(id)
            _, engine = self._owners.pop(id)
            connection.outbox.drop(id)
            engine.cancel(id)

    def _release(self, connection: _Connection) -> None:
        """Everything that a closed connection held: its requests, and its entry."""
        for id in list(connection.ids):
            self._cancel(connection, id)
        self._connections.pop(connection, None)
        connection.writer.transport.abort()

    def _deliver(self, events: list[Event]) -> None:
        """In the loop: each event to whoever asked for it. Events of cancelled requests go nowhere."""
        for event in events:
            owner = self._owners.get(event.id)
            if owner is None:
                continue
            connection, _ = owner
            connection.outbox.add(event)
            if event.finish_reason is not None:
                del self._owners[event.id]
                connection.ids.discard(event.id)
            if connection.outbox.unread > MAX_UNREAD:
                logger.error("closing a connection that left %d tokens unread", connection.outbox.unread)
                self._connections[connection].cancel()
                self._release(connection)
            connection.wake.set()

    @property
    def _first(self) -> EngineLike:
        return next(iter(self._hosted.values())).engine


def _as_ours(error: Exception) -> JaxmlError:
    """The error as it may be told: the text of one that is not ours may hold what was asked."""
    if isinstance(error, JaxmlError):
        return error
    where = "".join(traceback.format_tb(error.__traceback__, limit=-4))
    logger.error("submitting failed: %s\n%s", type(error).__name__, where)
    todo = "see the server's log"
    return JaxmlError("the request", expected="accepted or refused", got=type(error).__name__, todo=todo)
