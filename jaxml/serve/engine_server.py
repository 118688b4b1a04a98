"""The worker's end of the socket: requests go to the engine, its events go out, one frame a step and connection.

Reads `infer.request` and `serve.frames`; `engine_loop` runs it beside the engine's thread. It knows neither LitServe nor
HTTP, so it is tested in-process. Everything here happens in one asyncio loop; only `emit` is called from another thread.

A connection is one API process. What it has not read yet is joined by request, so it never holds more than the answers
it asked for, and neither the engine nor another connection waits for it; one that is hopelessly behind is closed. A
closed connection cancels its requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from jaxml.errors import JaxmlError, QueueFullError, RequestError
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
        self.unread += 1 + len(event.tokens) + sum(1 + len(item.top) for item in event.logprobs)

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
    """Serves one engine on a unix socket, until `close`.

    `emit` is what the engine has to be built with; it may be called from any thread once `listen` was awaited.
    """

    def __init__(self) -> None:
        self._owners: dict[str, _Connection] = {}
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._engine: EngineLike | None = None
        self._card: Message = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Server | None = None

    def emit(self, events: list[Event]) -> None:
        """Takes the events of one step of the engine. Returns at once."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, events)

    async def listen(self, socket: str, engine: EngineLike, card: Message) -> None:
        """Accept connections on `socket` (a path in a directory that only this user can enter).

        card: plain values that say what is served; each connection is greeted with them.
        """
        self._loop = asyncio.get_running_loop()
        self._engine, self._card = engine, card
        self._server = await asyncio.start_unix_server(self._serve, path=socket)

    async def close(self) -> None:
        """Stop accepting, close every connection and cancel its requests."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections.values()):
            task.cancel()
        await asyncio.gather(*self._connections.values(), return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer)
        connection.reply({"op": "hello", "protocol": PROTOCOL, "card": self._card})
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
            connection.reply(self._submit(connection, [request_from_plain(item) for item in message["requests"]], call))
        elif op == "cancel":
            for id in message["ids"]:
                self._cancel(connection, id)
        elif op == "stats":
            connection.reply({"op": "stats", "call": call, "stats": dict(self._running_engine.stats())})
        else:
            raise FrameError("a message", expected="submit, cancel or stats", got=repr(op)[:40], todo="mend the client")

    def _submit(self, connection: _Connection, requests: list[Request], call: Any) -> Message:
        """All of them or none: those that were accepted before one is refused are cancelled."""
        accepted: list[str] = []
        for request in requests:
            self._owners[request.id] = connection
            connection.ids.add(request.id)
            accepted.append(request.id)
            try:
                self._running_engine.submit(request)
            except (RequestError, QueueFullError) as refusal:
                for id in accepted:
                    self._cancel(connection, id)
                return {"op": "refused", "call": call, **refusal_to_plain(refusal)}
        return {"op": "accepted", "call": call}

    def _cancel(self, connection: _Connection, id: str) -> None:
        if id in connection.ids:
            connection.ids.discard(id)
            self._owners.pop(id, None)
            connection.outbox.drop(id)
            self._running_engine.cancel(id)

    def _release(self, connection: _Connection) -> None:
        """Everything that a closed connection held: its requests, and its entry."""
        for id in list(connection.ids):
            self._cancel(connection, id)
        self._connections.pop(connection, None)
        connection.writer.transport.abort()

    def _deliver(self, events: list[Event]) -> None:
        """In the loop: each event to whoever asked for it. Events of cancelled requests go nowhere."""
        for event in events:
            connection = self._owners.get(event.id)
            if connection is None:
                continue
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
    def _running_engine(self) -> EngineLike:
        if self._engine is None:
            raise JaxmlError("the engine", expected="one", got="none yet", todo="await listen() first")
        return self._engine
