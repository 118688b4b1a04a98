"""A small deterministic engine for the tests of the transport: a real thread, one step a millisecond, no jax.

An answer depends on its prompt and seed alone, but for a bias or a constraint. A prompt takes one step of prefill for each
`PIECE` tokens; the request then has one of `max_batch` places and gets one token a step, `max_tokens` in all (64 by default).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxml.errors import CheckpointError, QueueFullError, RequestError
from jaxml.infer.constraints import Matcher, Vocabulary, compile_constraint
from jaxml.infer.request import Event, Request, TokenLogprob
from jaxml.inputs.tokenizers import ByteTokenizer

PIECE = 16
CONTEXT_LENGTH = 100_000
VOCAB_SIZE = 257
STUCK = 7


def token_of(request: Request, index: int) -> int:
    """The token that the engine answers at a place: a letter, or the one with the greatest bias."""
    if request.sampling.logit_bias:
        return max(request.sampling.logit_bias, key=lambda item: item[1])[0]
    return 97 + (sum(request.prompt) * 7 + (request.sampling.seed or 0) * 3 + index * index) % 26


def answer_of(request: Request) -> str:
    """The whole answer to a request."""
    return "".join(chr(token_of(request, index)) for index in range(request.sampling.max_tokens or 64))


def embedding_of(prompt: tuple[int, ...]) -> tuple[float, ...]:
    """The vector of a prompt."""
    return (len(prompt) / 8, sum(prompt) / 1024, -0.5, 0.25)


def greatest(matcher: Matcher) -> int | None:
    """The greatest token that a grammar allows, which soon ends JSON; None for the end of text alone."""
    bits = matcher.mask()
    tokens = [token for token in range(256) if bits[token // 32] >> (token % 32) & 1]
    return max(tokens, default=None)


class SmallEngine:
    """`infer.engine.Engine`'s methods over `token_of`. `fail_on`: a prompt with this token makes the step fail."""

    fail_on = 13
    on_stuck: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, emit: Callable[[list[Event]], None], max_batch: int = 4, max_queue: int = 16, step_s: float = 1e-3
    ):
        self.emit, self.max_batch, self.max_queue, self.step_s = emit, max_batch, max_queue, step_s
        self._changed = threading.Condition()
        self._queue: deque[Request] = deque()
        self._places: dict[str, tuple[Request, int]] = {}  # id to the request and its steps so far
        self._matchers: dict[str, Matcher] = {}
        self._vocabulary: Vocabulary | None = None
        self._counts: Counter[str] = Counter()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def warm_up(self) -> int:
        return 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def submit(self, request: Request) -> None:
        request.sampling.checked(VOCAB_SIZE)
        if not 0 < len(request.prompt) < CONTEXT_LENGTH:
            raise RequestError(
                "prompt", expected="1 token to the context", got=f"{len(request.prompt)}", todo="change it"
            )
        with self._changed:
            if request.sampling.constraint is not None:
                self._vocabulary = self._vocabulary or Vocabulary.of(ByteTokenizer())
                self._matchers[request.id] = compile_constraint(request.sampling.constraint, self._vocabulary)
            if len(self._queue) >= self.max_queue:
                raise QueueFullError("the queue", expected="a place", got="none", todo="try again later")
            self._queue.append(request)
            self._counts["accepted"] += 1
            self._changed.notify()

    def cancel(self, id: str) -> None:
        with self._changed:
            before = len(self._queue) + len(self._places)
            self._queue = deque(request for request in self._queue if request.id != id)
            self._places.pop(id, None)
            self._counts["cancelled"] += before - len(self._queue) - len(self._places)

    def stats(self) -> dict[str, int]:
        with self._changed:
            now = {"running": len(self._places), "queued": len(self._queue)}
            counts = {name: self._counts[name] for name in ("accepted", "finished", "cancelled", "num_steps")}
            return {**now, "free_places": self.max_batch - len(self._places), **counts}

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._places or self._is_closing)
                if self._is_closing:
                    return
                while self._queue and len(self._places) < self.max_batch:
                    request = self._queue.popleft()
                    self._places[request.id] = (request, -(len(request.prompt) // PIECE))
                self._counts["num_steps"] += 1
                events = [self._advance(id) for id in list(self._places)]
                events = [event for event in events if event is not None]
                if events:
                    self.emit(events)
            time.sleep(self.step_s)

    def _advance(self, id: str) -> Event | None:
        request, done = self._places[id]
        self._places[id] = (request, done + 1)
        if done < 0:
            return None
        if STUCK in request.prompt:
            del self._places[id]
            self.on_stuck()
            return Event(id, finish_reason="error", error="stuck")
        if self.fail_on in request.prompt:
            del self._places[id]
            return Event(id, finish_reason="error", error="internal", detail="the step failed")
        first = self._first(request) if done == 0 else {}
        if request.wants_embedding:
            self._end(id)
            return Event(id, finish_reason="stop", num_tokens=0, embedding=embedding_of(request.prompt), **first)
        token = self._next(request, done)
        if token is None:
            self._end(id)
            return Event(id, finish_reason="stop", num_tokens=done + 1, **first)
        is_last = done + 1 == (request.sampling.max_tokens or 64)
        wanted = request.sampling.num_logprobs
        logprobs = () if wanted is None else (scored(token, wanted),)
        receipt = {"seed": request.sampling.seed} if request.wants_receipt and is_last else None
        if is_last:
            self._end(id)
        finish = "length" if is_last else None
        return Event(id, (token,), chr(token), logprobs, finish, done + 1, receipt=receipt, **first)

    def _next(self, request: Request, done: int) -> int | None:
        matcher = self._matchers.get(request.id)
        if matcher is None:
            return token_of(request, done)
        token = None if matcher.is_finished else greatest(matcher)
        if token is not None:
            matcher.advance([token])
        return token

    def _first(self, request: Request) -> dict[str, Any]:
        """What the first event says besides: half of the prompt was there already."""
        told: dict[str, Any] = {"queue_s": 0.001, "num_cached": len(request.prompt) // 2}
        wanted = request.sampling.num_prompt_logprobs
        if wanted is not None:
            told["prompt_logprobs"] = tuple(scored(token, wanted) for token in request.prompt[1:])
        return told

    def _end(self, id: str) -> None:
        del self._places[id]
        self._matchers.pop(id, None)
        self._counts["finished"] += 1


def scored(token: int, num_top: int) -> TokenLogprob:
    """A token's log-probability, of which it is the likeliest."""
    return TokenLogprob(token, -0.5, tuple(((token + other) % 256, -0.5 - other) for other in range(num_top)))


@dataclass(frozen=True)
class OpenSmallEngine:
    """What `EngineLoop` opens in the worker, in `open_s` seconds: bytes are its tokens. fault: why it cannot be opened.
    A prompt with the token `STUCK` makes the engine call `on_stuck`."""

    max_batch: int = 4
    max_queue: int = 16
    step_s: float = 1e-3
    open_s: float = 0.0
    name: str = "small"
    fault: str = ""

    def __call__(
        self, emit: Callable[[list[Event]], None], on_stuck: Callable[[], None]
    ) -> tuple[SmallEngine, dict[str, Any]]:
        time.sleep(self.open_s)
        if self.fault:
            raise CheckpointError("the checkpoint", expected="one", got=self.fault, todo="look")
        files = ByteTokenizer().files()
        card = {"name": self.name, "created": 1, "context_length": CONTEXT_LENGTH, "tokenizer": files}
        card |= {"has_embeddings": True, "embedding_size": 4}
        engine = SmallEngine(emit, self.max_batch, self.max_queue, self.step_s)
        engine.on_stuck = on_stuck
        return engine, card
