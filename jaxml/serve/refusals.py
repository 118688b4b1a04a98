"""HTTP answers that refuse, in the shape that OpenAI's clients read.

Reads `serve.errors` and `serve.rates`; `serve.guard` and `serve.bodies` send them, `lifecycle` hands `refuse_http_error` to
FastAPI.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxml.serve.errors import RETRY_AFTER_S, error_object, error_reply
from jaxml.serve.rates import RateLimitError


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


def refuse_unknown(has_key: bool) -> JSONResponse:
    """401: nobody is known by what was sent."""
    message = "the API key is not known here" if has_key else "an API key is needed: Authorization: Bearer KEY"
    return refuse(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def refuse_rate(error: RateLimitError) -> JSONResponse:
    """429, and when to come back."""
    reply = error_reply(error)
    return JSONResponse(reply.body, reply.status, headers=reply.headers)


async def refuse_http_error(request: Request, error: Exception) -> Response:
    """For `app.add_exception_handler`: what LitServe and FastAPI raise, in OpenAI's shape."""
    if isinstance(error, HTTPException):
        return refuse(error.status_code, str(error.detail))
    if isinstance(error, RequestValidationError):  # Its own text repeats the input.
        return refuse(400, "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()))
    return refuse(500, "an error in the server")
