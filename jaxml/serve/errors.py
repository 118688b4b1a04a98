"""Errors as OpenAI's clients read them: of requests, of the engine, of the service.

Reads `errors`, `infer.request` and `serve.requests`; `serve.answers`, the endpoints and the gate send what it makes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from jaxml.errors import JaxmlError, QueueFullError, RequestError
from jaxml.infer.request import Event
from jaxml.serve.requests import UnknownModelError

RETRY_AFTER_S = 1
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
INTERNAL = "the server failed to answer; its log says where"
# What a client is told of an answer that failed, by the kind of the engine's error: status and message.
FAILURES: dict[str, tuple[int, str]] = {
    "deadline": (504, "the answer was not there within the time that the request, or the service, allows for it"),
    "lost": (503, "the process that computes the answer has ended; ask again"),
    "closed": (503, "the server is being stopped; ask again"),
    "constraint": (500, "the answer could not follow the form that was asked for; ask for a simpler one"),
    "non_finite": (500, "the model gave numbers that are none"),
    "stuck": (500, "a step of the model took too long"),
}
CODES = {"deadline": "deadline_exceeded", "lost": "unavailable", "closed": "unavailable", "internal": "internal_error"}


@dataclass(frozen=True)
class Reply:
    """An HTTP answer: status, JSON body, headers."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it. `param` names the field that is wrong, `code` the kind of error."""
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_reply(error: Exception) -> Reply:
    """The answer that tells a client of an error. What is not its own fault is told without any of the inside."""
    if isinstance(error, UnknownModelError):
        return Reply(404, error_object(404, told(error), "model", "model_not_found"))
    if isinstance(error, RequestError):
        return Reply(400, error_object(400, told(error), error.faults[0].failed))
    # `rates.RateLimitError` says when to come back.
    retry_after_s = getattr(error, "retry_after_s", None)
    if isinstance(error, JaxmlError) and retry_after_s is not None:
        headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
        return Reply(429, error_object(429, told(error), code="rate_limit_exceeded"), headers)
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return Reply(429, error_object(429, told(error), code="queue_full"), headers)
    return Reply(500, error_object(500, INTERNAL, code="internal_error"))


def failure_of(event: Event) -> Reply:
    """The answer to a request that the engine ended with an error. Nothing of the error's detail is told."""
    kind = event.error or "internal"
    status, message = FAILURES.get(kind, (500, INTERNAL))
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    return Reply(status, error_object(status, message, code=CODES.get(kind, kind)), headers)


def told(error: JaxmlError) -> str:
    """All faults of an error in one line."""
    faults = [f"{fault.failed}: expected {fault.expected}, got {fault.got}; {fault.todo}" for fault in error.faults]
    if len(faults) == 1:
        return faults[0]
    return f"{len(faults)} faults. " + " ".join(f"({number}) {fault}." for number, fault in enumerate(faults, 1))
