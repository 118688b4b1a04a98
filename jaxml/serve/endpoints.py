"""The paths of language models, as OpenAI's API has them: our LitSpec, which talks to the engines and not to LitServe.

Reads `serve.requests`, `serve.embeddings`, `serve.token_calls` (what is asked), `serve.answers`, `serve.streams`,
`serve.errors` (what is told), `serve.engine_client` (who computes it), `serve.visit` (whose it is), `serve.openapi`,
`serve.served` and `serve.private`; `launch` hands it to LitServe. It runs in the API processes.

A client that leaves cancels its request wherever that is: the gate sees it go, streamed or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from litserve.specs.base import LitSpec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jaxml.errors import JaxmlError
from jaxml.infer.request import Deadlines, Lane
from jaxml.infer.request import Request as EngineRequest
from jaxml.serve.answers import Answer
from jaxml.serve.embeddings import EmbeddingAnswer, parse_embeddings
from jaxml.serve.engine_client import Call, EngineClient, WorkerLostError
from jaxml.serve.errors import RETRY_AFTER_S, Reply, error_object, error_reply, told
from jaxml.serve.frames import FrameError
from jaxml.serve.openapi import describe
from jaxml.serve.private import Private
from jaxml.serve.requests import CompletionCall, choose_model, named_model, parse_chat, parse_completion
from jaxml.serve.served import Limits, Served
from jaxml.serve.streams import follow, stream
from jaxml.serve.token_calls import detokenize, tokenize
from jaxml.serve.visit import Visit

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
MODELS, MODEL = "/v1/models", "/v1/models/{model}"
TOKENIZE, DETOKENIZE = ("/tokenize", "/v1/tokenize"), ("/detokenize", "/v1/detokenize")
OPENAPI = "/openapi.json"
ROUTES = {COMPLETIONS: "POST", CHAT: "POST", EMBEDDINGS: "POST", MODELS: "GET", MODEL: "GET", OPENAPI: "GET"}
ROUTES |= dict.fromkeys((*TOKENIZE, *DETOKENIZE), "POST")
# Proxies must neither keep an event back nor answer with an old one.
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
CLIENT_LEFT = 499

Parse = Callable[[Any, Served, tuple[Lane, ...]], CompletionCall]


class EngineSpec(LitSpec):
    """The endpoints of one worker's engines. The connection to it is opened in each API process when it is first needed.

    limits, deadlines: of the service.
    """

    def __init__(self, private: Private, limits: Limits = Limits(), deadlines: Deadlines = Deadlines()):
        super().__init__()
        # LitServe keys its queues by the path, and fails without one; ours stay empty.
        self.api_path = COMPLETIONS
        self._private = private
        self._limits, self._deadlines = limits, deadlines
        self._client: EngineClient | None = None
        self._opening: asyncio.Future[dict[str, Served]] | None = None
        self.add_endpoint(COMPLETIONS, self.completions, ["POST"])
        self.add_endpoint(CHAT, self.chat_completions, ["POST"])
        self.add_endpoint(EMBEDDINGS, self.embeddings, ["POST"])
        self.add_endpoint(MODELS, self.models, ["GET"])
        self.add_endpoint(MODEL, self.model, ["GET"])
        self.add_endpoint(OPENAPI, self.openapi, ["GET"])
        for path in TOKENIZE:
            self.add_endpoint(path, self.tokenize, ["POST"])
        for path in DETOKENIZE:
            self.add_endpoint(path, self.detokenize, ["POST"])

    def __getstate__(self) -> dict[str, Any]:
        """LitServe pickles its LitAPI, and the spec with it, to the worker, which needs none of this."""
        return {**super().__getstate__(), "_client": None, "_opening": None}

    @property
    def stream(self) -> bool:  # type: ignore[bad-override]
        """True keeps LitServe from compressing answers, which would hold back the events of a stream."""
        return True

    async def completions(self, request: Request) -> Response:
        return await self._completed(Visit(request.scope), parse_completion)

    async def chat_completions(self, request: Request) -> Response:
        return await self._completed(Visit(request.scope), parse_chat)

    async def embeddings(self, request: Request) -> Response:
        visit = Visit(request.scope)
        try:
            served = choose_model(visit.body, await self._served())
            asked = await asyncio.to_thread(parse_embeddings, visit.body, served, visit.lanes)
            visit.asked(served.name, asked.num_tokens, len(asked.inputs), asked.num_tokens)
            answer = EmbeddingAnswer(asked, visit.tenant)
            call = await self._start(visit, answer.requests, served.name, lambda: asked.num_tokens)
        except JaxmlError as error:
            return _response(reply_of(error))
        try:
            async for event in call:
                visit.event(event)
                answer.take(event)
                if answer.failure is not None:
                    break
        finally:
            call.close()
        return _response(answer.reply()) if answer.is_finished else Response(status_code=CLIENT_LEFT)

    async def tokenize(self, request: Request) -> Response:
        return await self._computed_here(request, tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._computed_here(request, detokenize)

    async def models(self, request: Request) -> Response:
        """What is served, with the context lengths that requests are held to."""
        try:
            served = await self._served()
        except WorkerLostError as error:
            return _response(reply_of(error))
        return JSONResponse({"object": "list", "data": [_entry(model) for model in served.values()]})

    async def model(self, request: Request) -> Response:
        """One of them. Raises nothing for a name that is not served: that is a 404."""
        try:
            served = await self._served()
            return JSONResponse(_entry(named_model(request.path_params["model"], served)))
        except JaxmlError as error:
            return _response(reply_of(error))

    async def openapi(self, request: Request) -> Response:
        """What all of this takes."""
        return JSONResponse(describe(self._limits))

    async def details(self) -> dict[str, dict[str, int | float]]:
        """The engines' counts. Raises WorkerLostError. The first call makes everything ready for the first request."""
        await self._served()
        return await self._engine.stats()

    async def _completed(self, visit: Visit, parse: Parse) -> Response:
        try:
            served = choose_model(visit.body, await self._served())
            # In a thread: a long text or template must not hold up the streams of others.
            asked = await asyncio.to_thread(parse, visit.body, served, visit.lanes)
            visit.asked(served.name, asked.num_prompt_tokens, len(asked.choices), asked.num_allowed_tokens)
            answer = Answer(asked, served.tokenizer, tenant=visit.tenant)
            call = await self._start(visit, answer.requests, served.name, lambda: answer.num_tokens)
        except JaxmlError as error:
            return _response(reply_of(error))
        if asked.stream:
            chunks = stream(answer, call, visit)
            return StreamingResponse(chunks, media_type="text/event-stream", headers=STREAM_HEADERS)
        await follow(answer, call, visit)
        return _response(answer.reply()) if answer.is_finished else Response(status_code=CLIENT_LEFT)

    async def _start(
        self, visit: Visit, requests: Sequence[EngineRequest], model: str, num_spent: Callable[[], int]
    ) -> Call:
        call = await self._engine.start(requests, model)
        visit.started(num_spent)
        visit.left.add_done_callback(lambda _: call.close())
        return call

    async def _computed_here(self, request: Request, answer: Callable[[Any, Served], dict[str, Any]]) -> Response:
        visit = Visit(request.scope)
        try:
            served = choose_model(visit.body, await self._served())
            return JSONResponse(await asyncio.to_thread(answer, visit.body, served))
        except JaxmlError as error:
            return _response(reply_of(error))

    async def _served(self) -> dict[str, Served]:
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.ensure_future(self._open())
        # Shielded: a client that leaves while it waits must not take this away from the others.
        return await asyncio.shield(self._opening)

    async def _open(self) -> dict[str, Served]:
        opened = [
            await asyncio.to_thread(Served.from_card, card, self._limits, self._deadlines)
            for card in await self._engine.cards()
        ]
        return {served.name: served for served in opened}

    @property
    def _engine(self) -> EngineClient:
        if self._client is None:
            self._client = EngineClient(self._private.socket)
        return self._client


def reply_of(error: JaxmlError) -> Reply:
    """The answer that tells a client of an error, those of the way to the worker among them."""
    if isinstance(error, WorkerLostError):  # The same request may be right a moment later.
        body = error_object(503, told(error), code="unavailable")
        return Reply(503, body, {"Retry-After": str(RETRY_AFTER_S)})
    return Reply(400, error_object(400, told(error))) if isinstance(error, FrameError) else error_reply(error)


def _entry(served: Served) -> dict[str, Any]:
    entry = {"id": served.name, "object": "model", "created": served.created, "owned_by": "jaxml"}
    return {**entry, "max_model_len": served.context_length}


def _response(reply: Reply) -> Response:
    return JSONResponse(reply.body, reply.status, headers=reply.headers)
