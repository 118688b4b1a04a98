"""Clients of a completions server: requests in a closed loop on raw sockets, and what their times say. Python alone.

Reads `interleave`; `serve_rows` drives it. Raw sockets and a look at the first and last event only, so that the client,
which shares the machine with the server, takes little of it; `Load.client_share` tells how much.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"
TIMEOUT_S = 60.0


class AnswerError(Exception):
    """A server answered otherwise than a load expects."""


@dataclass(frozen=True)
class Answer:
    """Seconds from sending a request to its first text and to its end (of an answer that comes whole: both the end)."""

    first_s: float
    end_s: float


@dataclass(frozen=True)
class Load:
    """All answers of one load. `seconds`: from its first request to its last answer; `num_tokens`: of each answer."""

    answers: tuple[Answer, ...]
    seconds: float
    num_tokens: int
    client_share: float

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens * self.requests_per_s

    def ttft_ms(self, share: float) -> float:
        """The time to the first text that `share` of the requests do not exceed."""
        return 1e3 * quantile([answer.first_s for answer in self.answers], share)

    def tpot_ms(self, share: float) -> float:
        """The same of the time per token after the first."""
        return 1e3 * quantile([(a.end_s - a.first_s) / (self.num_tokens - 1) for a in self.answers], share)


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed.

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5), quantile([4.0, 1.0, 3.0, 2.0], 0.95)
    (2.0, 4.0)
    """
    ranked = sorted(values)
    at_most = -(-share * len(ranked) // 1)
    return ranked[max(0, int(at_most) - 1)]


def load(port: int, path: str, body: dict[str, Any], *, streams: int, seconds: float) -> Load:
    """`streams` clients that ask for `seconds`, each again as soon as it was answered; every answer counts.

    body: the request, with `max_tokens` tokens to generate, all of which must come; its `stream` says how.
    Raises AnswerError: another status than 200, a shorter answer, one that breaks off.
    """
    return asyncio.run(_load(port, path, body, streams, seconds))


async def _load(port: int, path: str, body: dict[str, Any], streams: int, seconds: float) -> Load:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    message = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    ask = ask_streamed if body.get("stream") else ask_whole
    begun, begun_cpu = time.perf_counter(), time.process_time()

    async def client() -> list[Answer]:
        answers = []
        while time.perf_counter() - begun < seconds:
            answers.append(await asyncio.wait_for(ask(port, message), TIMEOUT_S))
        return answers

    answers = await asyncio.gather(*(client() for _ in range(streams)))
    taken = time.perf_counter() - begun
    share = (time.process_time() - begun_cpu) / taken
    return Load(tuple(answer for some in answers for answer in some), taken, body["max_tokens"], share)


async def ask_streamed(port: int, message: bytes) -> Answer:
    """One request whose answer comes as server-sent events, each a JSON object as OpenAI's completions have."""
    begun = time.perf_counter()
    reader, writer = await _sent(port, message)
    first_s, end_s = None, None
    try:
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter() - begun
            # JSON is read only where it decides something: before the first text, and where an end may be told.
            if first_s is None and _choice(line[6:])["text"]:
                first_s = now
            if b'"length"' in line and _choice(line[6:])["finish_reason"] == "length":
                end_s = now
            elif b'"error"' in line:
                raise AnswerError(line.decode()[:300])
    finally:
        writer.close()
    if first_s is None or end_s is None:
        raise AnswerError("a stream that ended without a text or without the reason `length`")
    return Answer(first_s, end_s)


async def ask_whole(port: int, message: bytes) -> Answer:
    """One request whose answer comes at once, as JSON."""
    begun = time.perf_counter()
    reader, writer = await _sent(port, message)
    try:
        content = await reader.read()
    finally:
        writer.close()
    end_s = time.perf_counter() - begun
    if _choice(content)["finish_reason"] != "length":
        raise AnswerError(content.decode()[:300])
    return Answer(end_s, end_s)


async def _sent(port: int, message: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The connection after the answer's head. Raises AnswerError when its status is not 200."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(message)
    head = await reader.readuntil(b"\r\n\r\n")
    if head.split(b" ", 2)[1] != b"200":
        told = head + await reader.read(500)
        writer.close()
        raise AnswerError(told.decode(errors="replace"))
    return reader, writer


def _choice(content: bytes) -> dict[str, Any]:
    try:
        return json.loads(content)["choices"][0]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise AnswerError(content.decode(errors="replace")[:300]) from error
