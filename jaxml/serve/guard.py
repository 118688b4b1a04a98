"""The door of an API process: who is let in, and to what. In front of LitServe's routing.

Reads `serve.bodies`, `serve.engine_client`, `serve.gate`, `serve.keys`, `serve.metrics`, `serve.operations`, `serve.page`,
`serve.rates` and `serve.refusals`; `launch` makes the `Door`, and LitServe puts the `Guard` around its application.

Deny by default: where there are keys, everything needs one but `/health/live` and the page at `/`, before a path is looked
at and before a body is read. Only the paths named are let through, so LitServe's own pages (`/info`, `/health`) are not
there; every refusal has OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxml.serve import page
from jaxml.serve.bodies import parse_body, read_body, replay, until_left
from jaxml.serve.engine_client import WorkerLostError
from jaxml.serve.gate import ACCOUNT, BODY, CALLER, DRAINING, ENDING, LEFT, READY, WATCHED, Details, Gate, Stats
from jaxml.serve.keys import LOCAL, Caller, KeyRing
from jaxml.serve.metrics import Metrics, Watched
from jaxml.serve.operations import CONTENT_TYPE, LIVE, METRICS, Operations, live
from jaxml.serve.operations import READY as READY_PATH
from jaxml.serve.rates import Account, RateLimitError, Rates
from jaxml.serve.refusals import refuse, refuse_for_now, refuse_rate, refuse_unknown

logger = logging.getLogger(__name__)

END_POLL_S = 0.2
CLIENT_LEFT = 499
PAGE, STATS = "/", "/stats"


@dataclass(frozen=True)
class Door:
    """What a `Guard` lets through.

    routes: path (of which a part may be `{name}`) to method. accepts_forms: a body that says it is multipart may be; any
    other is taken for JSON. details: asked for the counts of the engines; it may raise WorkerLostError. None: the
    application goes through LitServe's queues and does not notice the end of its worker, so the guard does; there is no page.
    keys: None lets everybody in. operations: where it is watched, if anywhere.
    """

    routes: Mapping[str, str]
    max_body_bytes: int
    metrics: Metrics
    accepts_forms: bool = False
    details: Details | None = None
    keys: KeyRing | None = None
    rates: Rates = field(default_factory=Rates)
    operations: Operations | None = None

    def find(self, path: str) -> tuple[str, str] | None:
        """The route of a path, and the method that it takes; None: there is nothing."""
        if path in self.routes:
            return path, self.routes[path]
        for route, method in self.routes.items():
            parts = ["[^/]+" if part.startswith("{") else re.escape(part) for part in route.split("/")]
            if "{" in route and re.fullmatch("/".join(parts), path):
                return route, method
        return None


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, gate: Gate, door: Door):
        self.app, self.gate, self.door = app, gate, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            async with contextlib.AsyncExitStack() as stack:
                if self.door.metrics.log is not None:
                    stack.callback(self.door.metrics.log.close)
                if self.door.operations is not None:
                    answers = {METRICS: self._metrics, LIVE: _live, READY_PATH: self._readiness}
                    await stack.enter_async_context(self.door.operations.running(answers))
                await self.app(scope, receive, send)
        elif scope["type"] == "http":
            unwatched = await self._look(scope)
            if unwatched is not None:
                await unwatched(scope, receive, send)
            else:
                await self._watch(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _look(self, scope: Scope) -> Response | None:
        """The answer to those who watch: nothing of it is counted, and nothing needs a place inside."""
        path, door = scope["path"], self.door
        if scope["method"] not in ("GET", "HEAD"):
            return None
        if path == LIVE:
            return live()
        if path == PAGE and door.details is not None:
            return Response(page.page(), media_type=page.CONTENT_TYPE, headers=page.headers())
        if path == READY_PATH and self._is_main(scope):
            readiness = await self._readiness()
            self.gate.answered()
            return readiness
        if path == READY_PATH and self._caller(scope) is not None:
            return await self._readiness()
        if path == STATS and door.details is not None and self._caller(scope) is not None:
            return JSONResponse(door.metrics.summary(await self._stats()))
        return None

    async def _watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, from who asks to the last byte of its answer."""
        caller, path = self._caller(scope), scope["path"]
        watched = self.door.metrics.begin(caller.tenant if caller else "", caller.tier if caller else "")
        answer = _Sending(send)
        try:
            found = self.door.find(path)
            watched.endpoint = found[0] if found else ""
            refusal = self._refusal(scope, caller, found[1] if found else None)
            if refusal is not None or caller is None:
                await (refusal or refuse_unknown(True))(scope, receive, answer)
            else:
                await self._let_in(scope, receive, answer, caller, watched)
        except Exception as error:
            # The message may hold what the client sent; where it happened does not.
            where = "".join(traceback.format_tb(error.__traceback__, limit=-8))
            logger.error("%s failed: %s\n%s", watched.endpoint or "a request", type(error).__name__, where)
            if answer.status is None:
                await refuse(500, "an error in the server; its log says where")(scope, receive, answer)
        finally:
            watched.end(answer.status if answer.status is not None and answer.is_whole else CLIENT_LEFT)

    def _refusal(self, scope: Scope, caller: Caller | None, method: str | None) -> Response | None:
        """What needs nothing from inside: nobody's requests, wrong paths and methods, a server that is not ready."""
        path, asked = scope["path"], scope["method"]
        if caller is None:
            return refuse_unknown(any(name == b"authorization" for name, _ in scope["headers"]))
        if method is None:
            return refuse(404, f"there is nothing at {path[:200]}; this server has {', '.join(self.door.routes)}")
        if asked != method:
            return refuse(405, f"{path} takes {method}, not {asked[:20]}", headers={"Allow": method})
        return self._closed()

    def _caller(self, scope: Scope) -> Caller | None:
        """Whose request it is; None: nobody's that is known here."""
        if self.door.keys is None:
            return LOCAL
        return self.door.keys.caller(_authorizations(scope))

    def _is_main(self, scope: Scope) -> bool:
        expected = f"Bearer {self.gate.secret}".encode()
        return any(hmac.compare_digest(value, expected) for value in _authorizations(scope))

    def _closed(self) -> Response | None:
        state = self.gate.state
        return None if state == READY else refuse_for_now(f"the server is {state}")

    async def _readiness(self) -> Response:
        state = self.gate.state
        stats: Stats = {}
        if state == READY and self.door.details is not None:
            try:
                stats = await self.door.details()
            except WorkerLostError:
                state = "without its worker"
        return JSONResponse({"status": state, **totals(stats)}, 200 if state == READY else 503)

    async def _metrics(self) -> Response:
        return Response(self.door.metrics.render(await self._stats()), headers={"Content-Type": CONTENT_TYPE})

    async def _stats(self) -> Stats:
        """The counts of the engines; nothing of those that do not answer."""
        if self.door.details is None or self.gate.state not in (READY, DRAINING):
            return {}
        try:
            return await self.door.details()
        except WorkerLostError:
            return {}

    async def _let_in(self, scope: Scope, receive: Receive, send: _Sending, caller: Caller, watched: Watched) -> None:
        self.gate.enter()
        leaving: asyncio.Task[None] | None = None
        account: Account | None = None
        try:
            # Once more, now that the main process can see this request: it closes the gate before it counts.
            refusal = self._closed()
            if refusal is None and scope["method"] == "POST":
                try:
                    account = self.door.rates.open(caller.tenant, caller.tier)
                    send.account = account
                except RateLimitError as error:
                    refusal = refuse_rate(error)
            body = await read_body(scope, receive, self.door.max_body_bytes) if refusal is None else refusal
            if isinstance(body, bytes) and scope["method"] == "POST":
                scope[BODY] = parse_body(scope, body, self.door.accepts_forms)
                body = scope[BODY] if isinstance(scope[BODY], Response) else body
            if body is None:
                return
            if isinstance(body, Response):
                await body(scope, receive, send)
                return
            leaving = asyncio.create_task(until_left(receive))
            send.leaving = leaving
            scope[LEFT], scope[CALLER], scope[ACCOUNT], scope[WATCHED] = leaving, caller, account, watched
            if self.door.details is None:
                await self._answer_while_it_lives(scope, replay(body, leaving), send)
            else:
                await self.app(scope, replay(body, leaving), send)
        finally:
            if leaving is not None:
                leaving.cancel()
            if account is not None:
                account.close()
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


class _Sending:
    """A `send` that knows how far the answer is, and says with it what is left of the account."""

    def __init__(self, send: Send):
        self.status: int | None = None
        self.is_whole = False
        self.account: Account | None = None
        self.leaving: asyncio.Future[None] | None = None
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.account is not None:
                left = [(name.encode(), value.encode()) for name, value in self.account.headers().items()]
                message = {**message, "headers": [*message.get("headers", []), *left]}
        has_left = self.leaving is not None and self.leaving.done()  # Afterwards it is done in any case.
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_whole = not has_left


def totals(stats: Stats) -> dict[str, float]:
    """The counts of all models together.

    >>> totals({"a": {"running": 1, "queued": 0}, "b": {"running": 2, "queued": 5}})
    {'running': 3, 'queued': 5}
    """
    sums: dict[str, float] = {}
    for counts in stats.values():
        for name, count in counts.items():
            sums[name] = sums.get(name, 0) + count
    return sums


def _authorizations(scope: Scope) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == b"authorization"]


async def _live() -> Response:
    return live()
