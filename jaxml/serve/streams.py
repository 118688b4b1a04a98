"""An answer as a stream of server-sent events: the first token at once, then at most one chunk of a choice every 20 ms.

Reads `serve.answers`, `serve.engine_client` and `serve.visit`; `serve.endpoints` sends what it yields.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from jaxml.serve.answers import DONE, Answer, sse
from jaxml.serve.engine_client import Call
from jaxml.serve.visit import Visit

# Sending costs more than a token where models are small; readers see no difference.
WINDOW_S = 0.02


async def follow(answer: Answer, call: Call, visit: Visit, news: asyncio.Event | None = None) -> None:
    """Take the engine's events as they come, until the answer has ended or the client has left. `news` is set for each."""
    try:
        async for event in call:
            visit.event(event)
            answer.take(event)
            if news is not None:
                news.set()
            if answer.failure is not None:
                return
    finally:
        call.close()
        if news is not None:
            news.set()


async def stream(answer: Answer, call: Call, visit: Visit) -> AsyncIterator[bytes]:
    """The events of a stream. One that fails says so and ends with DONE; one whose client has left just ends."""
    news = asyncio.Event()
    following = asyncio.ensure_future(follow(answer, call, visit, news))
    try:
        if opening := answer.opening():
            yield b"".join(map(sse, opening))
        while not following.done():
            await news.wait()
            news.clear()
            if chunks := answer.chunks():
                yield b"".join(map(sse, chunks))
                await asyncio.wait({following}, timeout=WINDOW_S)
        following.result()
        if answer.is_finished:
            rest = answer.chunks() + ([] if answer.failure else answer.closing())
            yield b"".join(map(sse, rest)) + DONE
    finally:
        following.cancel()
        call.close()
