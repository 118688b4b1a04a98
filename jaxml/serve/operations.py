"""The bind for those who run the service: metrics for Prometheus and health for probes, apart from what clients reach.

Reads `errors` through `serve.address`; `lifecycle` binds the socket before the API process is forked, and `serve.guard` runs
it in that process, in the same event loop. There are no keys here: it is 127.0.0.1 unless somebody says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

import uvicorn
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

METRICS, LIVE, READY = "/metrics", "/health/live", "/health/ready"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Answer = Callable[[], Awaitable[Response]]


class Operations:
    """Serves `answers`, by their paths, on a socket that listens. Everything else is a 404; only GET and HEAD are there."""

    def __init__(self, listening: socket.socket):
        self._socket = listening

    @contextlib.asynccontextmanager
    async def running(self, answers: Mapping[str, Answer]) -> AsyncIterator[None]:
        """Inside, it answers."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return
            answer = answers.get(scope["path"])
            if answer is None:
                response: Response = PlainTextResponse(f"there are {', '.join(answers)}\n", 404)
            elif scope["method"] not in ("GET", "HEAD"):
                response = PlainTextResponse("read only\n", 405, {"Allow": "GET, HEAD"})
            else:
                response = await answer()
            await response(scope, receive, send)

        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", server_header=False)
        server = _Server(config)
        serving = asyncio.create_task(server.serve([self._socket]))
        try:
            yield
        finally:
            server.end()
            await serving


class _Server(uvicorn.Server):
    """A second server in a process whose signals belong to the first one, and that does nothing while nobody asks."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self._ended = asyncio.Event()

    def end(self) -> None:
        self.should_exit = self.force_exit = True
        self._ended.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self._ended.wait()


def live() -> Response:
    """The process answers: that is all."""
    return JSONResponse({"status": "live"})
