"""What the API processes and the engine's worker say to each other: length-prefixed msgpack over a unix socket.

Reads `errors` and `infer.request`; `engine_server` and `engine_client` are the two ends. A frame is four bytes of length
(big-endian) and one msgpack map of plain values: nothing that is unpickled, nothing that could become code.

From an API process: `submit` (call, model, requests), `cancel` (ids), `stats` (call). From the worker: `hello` (first,
with a card for each model that is served), `accepted` (call), `refused` (call, error, faults), `stats` (call, stats by
model), and `events`, one frame for each step of an engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from typing import Any

import msgpack

from jaxml.errors import Fault, JaxmlError, QueueFullError, RequestError
from jaxml.infer.request import Deadlines, Event, Request, Sampling, TokenLogprob

# The first number that differs between an old worker and a new API process would be here; both are of one start.
PROTOCOL = 2
MAX_FRAME_BYTES = 64 * 2**20
_LENGTH = struct.Struct(">I")
_REFUSALS: dict[str, type[JaxmlError]] = {kind.__name__: kind for kind in (RequestError, QueueFullError)}

_MISSING = object()
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Event) if field.name != "id"}

Message = dict[str, Any]


class FrameError(JaxmlError):
    """What came over the socket is no frame of ours, or what should go is too large for one."""


def pack(message: Message) -> bytes:
    """The frame of a message of plain values. Raises FrameError when it is too large, or a number in it is."""
    try:
        body: bytes = msgpack.packb(message)  # type: ignore[bad-assignment]
    except OverflowError as error:
        todo = "correct the number"
        raise FrameError("a message to the other process", expected="64 bits", got=str(error), todo=todo) from error
    if len(body) > MAX_FRAME_BYTES:
        todo = "ask for fewer prompts, shorter ones, or fewer log-probabilities in one request"
        raise FrameError("a message to the other process", expected=_limit(), got=f"{len(body)} bytes", todo=todo)
    return _LENGTH.pack(len(body)) + body


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """The next message, or None when the other side has closed between two frames.

    Raises FrameError: a length above the limit, a frame that is cut off, or one that is not a map of plain values.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise _not_ours(f"{length} bytes")
        body = await reader.readexactly(length)
    except asyncio.IncompleteReadError as cut:
        if not cut.partial and cut.expected == _LENGTH.size:
            return None
        raise _not_ours("a frame that is cut off") from cut
    except ConnectionError:
        return None
    try:
        message = msgpack.unpackb(body, ext_hook=_refuse_extension, strict_map_key=True)
    except ValueError as error:  # msgpack's own errors and broken UTF-8 are among them
        raise _not_ours(type(error).__name__) from error
    if not isinstance(message, dict):
        raise _not_ours(type(message).__name__)
    return message


def request_to_plain(request: Request) -> dict[str, Any]:
    """A request as plain values. `request_from_plain` is the inverse, also after a trip through msgpack."""
    constraint = request.sampling.constraint
    sampling = {**vars(request.sampling), "constraint": constraint and vars(constraint)}
    return {**vars(request), "sampling": sampling, "deadlines": vars(request.deadlines)}


def request_from_plain(value: dict[str, Any]) -> Request:
    """The request that `request_to_plain` wrote. Raises KeyError or TypeError for anything else."""
    fields: dict[str, Any] = {
        **value,
        "prompt": tuple(value["prompt"]),
        "sampling": Sampling.from_plain(value["sampling"]),
        "deadlines": Deadlines(**value["deadlines"]),
    }
    return Request(**fields)


def event_to_plain(event: Event) -> dict[str, Any]:
    """An event as plain values, without the fields that are as by default: most of them, in every row of every step."""
    value = {name: item for name, item in vars(event).items() if item != _DEFAULTS.get(name, _MISSING)}
    for name in ("logprobs", "prompt_logprobs"):
        if name in value:
            value[name] = tuple(vars(logprob) for logprob in value[name])
    return value


def event_from_plain(value: dict[str, Any]) -> Event:
    """The event that `event_to_plain` wrote, after a trip through msgpack (which turns tuples into lists)."""
    fields: dict[str, Any] = dict(value)
    for name in ("tokens", "embedding"):
        if name in value:
            fields[name] = tuple(value[name])
    for name in ("logprobs", "prompt_logprobs"):
        if name in value:
            fields[name] = tuple(map(_logprob, value[name]))
    return Event(**fields)


def _logprob(value: dict[str, Any]) -> TokenLogprob:
    return TokenLogprob(value["token"], value["logprob"], tuple((token, logprob) for token, logprob in value["top"]))


def join_events(events: list[Event]) -> Event:
    """One event that says what several of one request say, in their order. At least one."""
    if len(events) == 1:
        return events[0]
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    for event in events:
        tokens.extend(event.tokens)
        logprobs.extend(event.logprobs)
    first = events[0]  # It alone may be the request's first, which says what the later ones do not repeat.
    return dataclasses.replace(
        events[-1],
        tokens=tuple(tokens),
        text="".join(event.text for event in events),
        logprobs=tuple(logprobs),
        queue_s=first.queue_s,
        num_cached=first.num_cached,
        prompt_logprobs=first.prompt_logprobs,
    )


def refusal_to_plain(error: JaxmlError) -> dict[str, Any]:
    """An error as plain values; `refusal_from_plain` raises its like on the other side."""
    return {"error": type(error).__name__, "faults": [vars(fault) for fault in error.faults]}


def refusal_from_plain(value: dict[str, Any]) -> JaxmlError:
    """The RequestError or QueueFullError that was written (anything else becomes a plain JaxmlError)."""
    kind = _REFUSALS.get(value["error"], JaxmlError)
    return kind.from_faults([Fault(**fault) for fault in value["faults"]])


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _not_ours(got: str) -> FrameError:
    todo = "see why the other process sent it: only the processes of one server may use this socket"
    return FrameError("a frame from the other process", expected=f"a msgpack map of {_limit()}", got=got, todo=todo)


def _limit() -> str:
    return f"at most {MAX_FRAME_BYTES // 2**20} MiB"
