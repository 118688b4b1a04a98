"""The body of a request, counted while it is read and parsed before anything else sees it, and the client that may leave.

Reads `serve.refusals`; `serve.guard` calls it for what it lets in.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope

from jaxml.serve.refusals import refuse


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes | Response | None:
    """The whole body; a refusal; None when the client has left meanwhile."""
    too_large = refuse(413, f"the body may have at most {max_bytes} bytes")
    announced = dict(scope["headers"]).get(b"content-length", b"")
    if announced.isdigit() and int(announced) > max_bytes:
        return too_large
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > max_bytes:
            return too_large
        more = message.get("more_body", False)
    return bytes(body)


def parse_body(scope: Scope, body: bytes, accepts_forms: bool) -> Any:
    """The JSON of a body, whatever it says that it is (`curl -d` says that it is URL-encoded), unless it says that it is a
    form and may be: then None. A Response: why it is none."""
    headers = dict(scope["headers"])
    if accepts_forms and headers.get(b"content-type", b"").startswith(b"multipart/form-data"):
        return None
    headers[b"content-type"] = b"application/json"
    scope["headers"] = list(headers.items())
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return refuse(400, f"the body is not JSON: {_told(error)}", code="invalid_json")


async def until_left(receive: Receive) -> None:
    """Until the client is gone; a server says so, too, when the answer was sent."""
    while (await receive())["type"] != "http.disconnect":
        pass


def replay(body: bytes, leaving: asyncio.Task[None]) -> Receive:
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


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _told(error: Exception) -> str:
    """Where the JSON is wrong, without repeating any of it."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "NaN, an infinity, a number that is too long, or text that is not UTF-8"
