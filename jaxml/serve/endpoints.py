"""The paths of a language model, as OpenAI's API has them: our LitSpec, which talks to the engine and not to LitServe.

Reads `serve.requests` (what is asked), `serve.answers` (what is told), `serve.engine_client` (who computes it),
`serve.gate` and `serve.private`; `launch` hands it to LitServe. It runs in the API processes.

A client that leaves cancels its request wherever that is: the gate sees it go, streamed or not.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litserve.specs.base import LitSpec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jaxml.errors import JaxmlError
from jaxml.infer.request import Event
from jaxml.inputs.tokenizers import Tokenizer, load_tokenizer
from jaxml.serve.answers import DONE, RETRY_AFTER_S, Answer, Reply, error_object, error_reply, sse, told
from jaxml.serve.engine_client import Call, EngineClient, WorkerLostError
from jaxml.serve.frames import FrameError
from jaxml.serve.gate import BODY, LEFT
from jaxml.serve.private import Private
from jaxml.serve.requests import CompletionCall, parse_chat, parse_completion

COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
ROUTES = {COMPLETIONS: "POST", CHAT: "POST", MODELS: "GET"}
# Proxies must neither keep an event back nor answer with an old one.
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
CLIENT_LEFT = 499

Parse = Callable[[Any, str, Tokenizer, int], CompletionCall]


@dataclass(frozen=True)
class Served:
    """What the worker said that it serves. `created`: when, in seconds since 1970."""

    name: str
    created: int
    context_length: int
    tokenizer: Tokenizer

    @classmethod
    def from_card(cls, card: dict[str, Any]) -> Served:
        """The worker's card, with the files of its tokenizer: text is encoded here, not in the worker."""
        with tempfile.TemporaryDirectory(prefix="jaxml-tokenizer-") as folder:
            for name, content in card["tokenizer"].items():
                (Path(folder) / name).write_bytes(content)
            return cls(card["name"], card["created"], card["context_length"], load_tokenizer(folder))


class EngineSpec(LitSpec):
    """One engine's endpoints. The connection to it is opened in each API process when it is first needed."""

    def __init__(self, private: Private):
        super().__init__()
        # LitServe keys its queues by the path, and fails without one; ours stay empty.
        self.api_path = COMPLETIONS
        self._private = private
        self._client: EngineClient | None = None
        self._opening: asyncio.Future[Served] | None = None
        self.add_endpoint(COMPLETIONS, self.completions, ["POST"])
        self.add_endpoint(CHAT, self.chat_completions, ["POST"])
        self.add_endpoint(MODELS, self.models, ["GET"])

    def __getstate__(self) -> dict[str, Any]:
        """LitServe pickles its LitAPI, and the spec with it, to the worker, which needs none of this."""
        return {**super().__getstate__(), "_client": None, "_opening": None}

    @property
    def stream(self) -> bool:  # type: ignore[bad-override]
        """True keeps LitServe from compressing answers, which would hold back the events of a stream."""
        return True

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, parse_completion)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, parse_chat)

    async def models(self, request: Request) -> Response:
        """What is served, with the context length that requests are held to."""
        try:
            served = await self._served()
        except WorkerLostError as error:
            return _response(unavailable(error))
        entry = {"id": served.name, "object": "model", "created": served.created, "owned_by": "jaxml"}
        return JSONResponse({"object": "list", "data": [{**entry, "max_model_len": served.context_length}]})

    async def details(self) -> dict[str, int | float]:
        """The engine's counts. Raises WorkerLostError. The first call makes everything ready for the first request."""
        await self._served()
        return await self._engine.stats()

    async def _answer(self, request: Request, parse: Parse) -> Response:
        try:
            served = await self._served()
            # In a thread: a long text or template must not hold up the streams of others.
            asked = await asyncio.to_thread(
                parse, request.scope[BODY], served.name, served.tokenizer, served.context_length
            )
            answer = Answer(asked, served.tokenizer)
            call = await self._engine.start(answer.requests)
        except WorkerLostError as error:
            return _response(unavailable(error))
        except FrameError as error:
            return _response(Reply(400, error_object(400, told(error))))
        except JaxmlError as error:
            return _response(error_reply(error))
        request.scope[LEFT].add_done_callback(lambda _: call.close())
        if asked.stream:
            return StreamingResponse(_chunks(answer, call), media_type="text/event-stream", headers=STREAM_HEADERS)
        try:
            async for event in call:
                _take(answer, call, event)
                if answer.failure is not None:
                    break
        finally:
            call.close()
        return _response(answer.reply()) if answer.is_finished else Response(status_code=CLIENT_LEFT)

    async def _served(self) -> Served:
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.ensure_future(self._open())
        # Shielded: a client that leaves while it waits must not take this away from the others.
        return await asyncio.shield(self._opening)

    async def _open(self) -> Served:
        return await asyncio.to_thread(Served.from_card, await self._engine.card())

    @property
    def _engine(self) -> EngineClient:
        if self._client is None:
            self._client = EngineClient(self._private.socket)
        return self._client


def unavailable(error: WorkerLostError) -> Reply:
    """503: the same request may be right a moment later."""
    body = error_object(503, told(error), code="unavailable")
    return Reply(503, body, {"Retry-After": str(RETRY_AFTER_S)})


async def _chunks(answer: Answer, call: Call) -> AsyncIterator[bytes]:
    """The events of a stream. One that fails says so and ends with DONE; one whose client has left just ends."""
    try:
        if opening := answer.opening():
            yield b"".join(map(sse, opening))
        async for event in call:
            if chunks := _take(answer, call, event):
                yield b"".join(map(sse, chunks))
            if answer.failure is not None:
                break
        if answer.is_finished:
            yield b"".join(map(sse, [] if answer.failure else answer.closing())) + DONE
    finally:
        call.close()


def _take(answer: Answer, call: Call, event: Event) -> list[dict[str, Any]]:
    """The chunks that an event makes; the loss of the worker is told as such."""
    if event.finish_reason == "error" and call.is_lost:
        return answer.fail(unavailable(WorkerLostError.ended()))
    return answer.take(event)


def _response(reply: Reply) -> Response:
    return JSONResponse(reply.body, reply.status, headers=reply.headers)
