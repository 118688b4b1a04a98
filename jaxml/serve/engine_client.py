"""The API process's end of the socket: one connection for all its requests, and the events of each in a queue of its own.

Reads `errors`, `infer.request` and `serve.frames`; `endpoints` reads it. All of it happens in the API process's event loop.

Every call ends: by the last event of each of its requests, by `close`, or because the worker was lost, which every
unfinished request is told at once by an event with finish_reason "error".
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence

from jaxml.errors import JaxmlError
from jaxml.infer.request import Event, Request
from jaxml.serve.frames import (
    PROTOCOL,
    FrameError,
    Message,
    event_from_plain,
    join_events,
    pack,
    read_message,
    refusal_from_plain,
    request_to_plain,
)

logger = logging.getLogger(__name__)

# Events of one call that wait for a client that reads slowly, before they are joined into one for each request.
MAX_WAITING = 64


class WorkerLostError(JaxmlError):
    """The process with the engine does not answer: it is still loading, it died, or it is being stopped."""

    @classmethod
    def to_connect(cls, got: str) -> WorkerLostError:
        """There is no connection now."""
        todo = "try again in a moment; if it stays so, see the server's log"
        return cls("the process that computes answers", expected="a connection", got=got, todo=todo)

    @classmethod
    def ended(cls) -> WorkerLostError:
        """There was one, and it ended before the answer did."""
        todo = "ask again; see the server's log"
        return cls("the answer", expected="a process that computes it to its end", got="one that has ended", todo=todo)


class Call:
    """One or more requests that belong together, and their events as they come: `async for event in call`.

    Iteration ends when every request has ended, and after `close`. `is_lost`: the worker died before that.
    """

    def __init__(self, client: EngineClient, ids: Sequence[str]):
        self.is_lost = False
        self._client = client
        self._open = set(ids)
        self._most = MAX_WAITING + len(ids)
        self._waiting: deque[Event] = deque()
        self._wake = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if not self._open:
                return
            self._wake.clear()
            await self._wake.wait()

    def close(self) -> None:
        """Cancel what has not ended. May be called at any time, more than once."""
        unfinished, self._open = self._open, set()
        if unfinished:
            self._waiting.clear()
            self._client.forget(unfinished)
        self._wake.set()

    def take(self, event: Event) -> None:
        """One more event, from the client's reader."""
        self._waiting.append(event)
        if len(self._waiting) > self._most:
            by_id: dict[str, list[Event]] = {}
            for waiting in self._waiting:
                by_id.setdefault(waiting.id, []).append(waiting)
            self._waiting = deque(join_events(events) for events in by_id.values())
        if event.finish_reason is not None:
            self._open.discard(event.id)
        self._wake.set()

    def lose(self) -> None:
        """The worker is gone: every unfinished request ends with an error."""
        self.is_lost = True
        for id in list(self._open):
            self.take(Event(id, finish_reason="error", error="lost"))


class EngineClient:
    """The connection of this process to the worker; it is opened when it is first needed, and again after a loss."""

    def __init__(self, socket: str):
        self.socket = socket
        self._lock = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._cards: list[Message] = []
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Message]] = {}
        self._calls: dict[str, Call] = {}

    async def cards(self) -> list[Message]:
        """What is served, as the worker says: a card for each model. Raises WorkerLostError."""
        await self._connect()
        return self._cards

    async def stats(self) -> dict[str, dict[str, int | float]]:
        """The counters of each model's engine. Raises WorkerLostError."""
        return (await self._ask({"op": "stats"}))["stats"]

    async def start(self, requests: Sequence[Request], model: str = "") -> Call:
        """Submit requests to a model ("": the first) together: all of them run, or none. No other request may have their
        ids.

        Raises RequestError or QueueFullError as the engine does, FrameError for what is too large to send, and
        WorkerLostError.
        """
        call = Call(self, [request.id for request in requests])
        self._calls.update({request.id: call for request in requests})
        with contextlib.ExitStack() as unless_accepted:
            unless_accepted.callback(call.close)  # also when the client's departure cancels the task that waits here
            asked = [request_to_plain(request) for request in requests]
            reply = await self._ask({"op": "submit", "model": model, "requests": asked})
            if reply["op"] == "refused":
                raise refusal_from_plain(reply)
            unless_accepted.pop_all()
        return call

    def forget(self, ids: set[str]) -> None:
        """Cancel these requests; their events are dropped from now on."""
        for id in ids:
            self._calls.pop(id, None)
        if self._writer is not None:
            self._writer.write(pack({"op": "cancel", "ids": list(ids)}))

    async def close(self) -> None:
        """Close the connection, which cancels everything that was asked through it."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _ask(self, message: Message) -> Message:
        writer = await self._connect()
        number = next(self._numbers)
        frame = pack({**message, "call": number})
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            writer.write(frame)
            return await reply
        finally:
            self._replies.pop(number, None)

    async def _connect(self) -> asyncio.StreamWriter:
        async with self._lock:
            if self._writer is not None:
                return self._writer
            try:
                reader, writer = await asyncio.open_unix_connection(self.socket)
            except OSError as error:
                raise WorkerLostError.to_connect(type(error).__name__) from error
            try:
                hello = await read_message(reader)
            except FrameError:
                hello = None
            if hello is None or hello.get("op") != "hello" or hello.get("protocol") != PROTOCOL:
                writer.transport.abort()
                raise WorkerLostError.to_connect("another greeting, or none")
            self._cards, self._writer = hello["cards"], writer
            # The reference is kept: asyncio drops a task that nobody holds, and every stream would hang.
            self._reading = asyncio.create_task(self._read(reader, writer))
            return writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (message := await read_message(reader)) is not None:
                self._handle(message)
        except FrameError as error:
            logger.error("closing the connection to the worker: %s", error)
        finally:
            self._writer = None
            writer.transport.abort()
            calls, self._calls = self._calls, {}
            for call in set(calls.values()):
                call.lose()
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(WorkerLostError.ended())

    def _handle(self, message: Message) -> None:
        if message["op"] == "events":
            for value in message["events"]:
                event = event_from_plain(value)
                call = self._calls.get(event.id)
                if call is not None:
                    if event.finish_reason is not None:
                        del self._calls[event.id]
                    call.take(event)
        else:
            reply = self._replies.get(message["call"])
            if reply is not None and not reply.done():
                reply.set_result(message)
