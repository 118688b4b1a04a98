"""The door of an API process: what is let in, and how the main process closes it. In front of LitServe's routing.

Reads `errors`, `serve.answers` and `serve.engine_client`; `lifecycle` makes the `Gate`, and LitServe puts the `Guard`
around its application.

Only the paths named are let through, so LitServe's own pages (`/`, `/info`, `/health`) are not there; a body is counted
while it is read, and refused before anything is made of it; every refusal has OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxml.serve.answers import RETRY_AFTER_S, error_object
from jaxml.serve.engine_client import WorkerLostError

logger = logging.getLogger(__name__)

# The states of a server: draining ends with the last answer, ending when the processes are gone.
STARTING, READY, DRAINING, ENDING = "starting", "ready", "draining", "ending"
_STATES = (STARTING, READY, DRAINING, ENDING)
END_POLL_S = 0.2

# What the guard leaves in the scope for the endpoints: the parsed JSON body, and a future that is done when the client
# has left (or has its answer).
BODY, LEFT = "jaxml.body", "jaxml.left"

Details = Callable[[], Awaitable[Mapping[str, Any]]]


class Gate:
    """What the main process and the API processes, its forks, agree on through shared memory.

    `state`: set by the main process alone. `inside`: requests that were let in and have not been answered to the end.
    `has_answered`: an API process was asked whether it is ready.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._state = context.Value("i", 0)
        self._inside = context.Value("q", 0)
        self._has_answered = context.Value("b", 0)

    @property
    def state(self) -> str:
        return _STATES[self._state.value]

    @state.setter
    def state(self, state: str) -> None:
        self._state.value = _STATES.index(state)

    @property
    def inside(self) -> int:
        return self._inside.value

    @property
    def has_answered(self) -> bool:
        return bool(self._has_answered.value)

    def answered(self) -> None:
        self._has_answered.value = 1

    def enter(self) -> None:
        with self._inside:
            self._inside.value += 1

    def leave(self) -> None:
        with self._inside:
            self._inside.value -= 1


class Guard:
    """ASGI middleware.

    routes: path to method, of all that is let through. accepts_forms: a body that says it is multipart may be; any other
    is taken for JSON, whatever it says (`curl -d` says that it is URL-encoded). details: asked by `/health/ready` for what
    it shows beside the state; it may raise WorkerLostError. None: the application goes through LitServe's queues and does
    not notice the end of its worker, so the guard does.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        gate: Gate,
        routes: Mapping[str, str],
        max_body_bytes: int,
        accepts_forms: bool = False,
        details: Details | None = None,
    ):
        self.app = app
        self.gate, self.routes = gate, routes
        self.max_body_bytes, self.accepts_forms = max_body_bytes, accepts_forms
        self.details = details

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = await self._look(scope)
            if refusal is not None:
                await refusal(scope, receive, send)
            else:
                await self._let_in(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _look(self, scope: Scope) -> Response | None:
        """The answer to what needs nothing from inside: health, wrong paths and methods, a server that is not ready."""
        path, method = scope["path"], scope["method"]
        if path in ("/health/live", "/health/ready") and method in ("GET", "HEAD"):
            return JSONResponse({"status": "live"}) if path == "/health/live" else await self._readiness()
        if path not in self.routes:
            return refuse(404, f"there is nothing at {path[:200]}; this server has {', '.join(self.routes)}")
        if method != self.routes[path]:
            return refuse(
                405, f"{path} takes {self.routes[path]}, not {method[:20]}", headers={"Allow": self.routes[path]}
            )
        return self._closed()

    def _closed(self) -> Response | None:
        state = self.gate.state
        return None if state == READY else refuse_for_now(f"the server is {state}")

    async def _readiness(self) -> Response:
        state = self.gate.state
        details: Mapping[str, Any] = {}
        if state == READY and self.details is not None:
            try:
                details = await self.details()
            except WorkerLostError:
                state = "without its worker"
        self.gate.answered()
        return JSONResponse({"status": state, **details}, 200 if state == READY else 503)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.gate.enter()
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        leaving: asyncio.Task[None] | None = None
        try:
            # Once more, now that the main process can see this request: it closes the gate before it counts.
            refusal = self._closed()
            body = await self._body(scope, receive) if refusal is None else refusal
            if body is None:
                return
            if not isinstance(body, bytes):
                await body(scope, receive, send)
                return
            leaving = asyncio.create_task(_until_left(receive))
            scope[LEFT] = leaving
            if self.details is None:
                await self._answer_while_it_lives(scope, _replay(body, leaving), watched_send)
            else:
                await self.app(scope, _replay(body, leaving), watched_send)
        except Exception as error:
            # The message may hold what the client sent; where it happened does not.
            where = "".join(traceback.format_tb(error.__traceback__, limit=-8))
            logger.error("%s failed: %s\n%s", scope["path"], type(error).__name__, where)
            if not started:
                await refuse(500, "an error in the server; its log says where")(scope, receive, send)
        finally:
            if leaving is not None:
                leaving.cancel()
            self.gate.leave()

    async def _answer_while_it_lives(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application's answer, or 503 when the server ends before: LitServe would wait for a worker that is gone."""
        answering = asyncio.ensure_future(self.app(scope, receive, send))
        try:
            while not (await asyncio.wait({answering}, timeout=END_POLL_S))[0]:
                if self.gate.state == ENDING:
                    await refuse_for_now("the server ends")(scope, receive, send)
                    return
            await answering
        finally:
            answering.cancel()

    async def _body(self, scope: Scope, receive: Receive) -> bytes | Response | None:
        """The whole body, and its JSON in the scope; a refusal; None when the client has left meanwhile."""
        headers = dict(scope["headers"])
        too_large = refuse(413, f"the body may have at most {self.max_body_bytes} bytes")
        announced = headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > self.max_body_bytes:
            return too_large
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self.max_body_bytes:
                return too_large
            more = message.get("more_body", False)
        if scope["method"] == "POST" and not (self.accepts_forms and _is_form(headers.get(b"content-type", b""))):
            headers[b"content-type"] = b"application/json"
            scope["headers"] = list(headers.items())
            try:
                scope[BODY] = json.loads(bytes(body), parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                return refuse(400, f"the body is not JSON: {_told(error)}", code="invalid_json")
        return bytes(body)


def refuse(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    return JSONResponse(error_object(status, message, param=param, code=code), status, headers=headers)


def refuse_for_now(message: str) -> JSONResponse:
    """503: the same request may be right a moment later."""
    return refuse(503, message, headers={"Retry-After": str(RETRY_AFTER_S)})


async def refuse_http_error(request: Request, error: Exception) -> Response:
    """For `app.add_exception_handler`: what LitServe and FastAPI raise, in OpenAI's shape."""
    if isinstance(error, HTTPException):
        return refuse(error.status_code, str(error.detail))
    if isinstance(error, RequestValidationError):  # Its own text repeats the input.
        return refuse(400, "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()))
    return refuse(500, "an error in the server")


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _replay(body: bytes, leaving: asyncio.Task[None]) -> Receive:
    """A `receive` that gives the body that was read, then waits for the client to leave."""
    given = False

    async def receive() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.wait({leaving})
        return {"type": "http.disconnect"}

    return receive


def _is_form(content_type: bytes) -> bool:
    return content_type.startswith(b"multipart/form-data")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _told(error: Exception) -> str:
    """Where the JSON is wrong, without repeating any of it."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "NaN, an infinity, a number that is too long, or text that is not UTF-8"
