"""Many requests at once, from any thread, in-process: one thread plans, computes and reports, step by step. No HTTP.

Reads `devices.compiles`, `infer.constraints`, `infer.decoding_model`, `infer.flat_runner`, `infer.progress`,
`infer.receipt`, `infer.request`, `infer.runner` and `infer.scheduler`; `serve` puts a socket in front of it.

Every accepted request ends in exactly one event with a finish reason, unless it was cancelled: then it has no event after
`cancel` has returned, and its row and pages are free before it returns. The thread that steps owns all device state; the
lock guards the scheduler and is free while the device computes, so submitting and cancelling never wait for that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from jaxml.devices.compiles import num_compiled
from jaxml.errors import JaxmlError, QueueFullError, RequestError
from jaxml.infer.constraints import Vocabulary, compile_constraint
from jaxml.infer.decoding_model import DecodingModel
from jaxml.infer.flat_runner import FlatRunner
from jaxml.infer.progress import Progress
from jaxml.infer.receipt import receipt_of
from jaxml.infer.request import Event, Request
from jaxml.infer.runner import PAGE_SIZE, FastRunner
from jaxml.infer.scheduler import Scheduler, Seat
from jaxml.infer.work import Runner
from jaxml.models.paged import page_bytes

log = logging.getLogger(__name__)

Emit = Callable[[list[Event]], None]
# Pages for so many bytes of keys and values, unless that is more than all rows could ever use.
CACHE_BYTES = 2**30
WATCHDOG_S = 120.0


class CompiledLateError(JaxmlError):
    """A program was compiled while requests waited for it."""


@dataclass(frozen=True)
class EngineSpec:
    """How an engine computes.

    mode: `fast` takes the quickest shapes, and an answer may differ from that to the same request alone where two tokens
    are as good as equal; `invariant` computes every step in one shape of `step_tokens` tokens, and nothing that runs beside
    a request changes a bit of its answer. max_batch: requests that decode together; max_queue: that wait for it.
    cache_bytes: of keys and values. watchdog_s: a step that takes longer ends its requests. strict: raise when something
    compiles after `warm_up`, for tests.
    """

    mode: Literal["fast", "invariant"] = "fast"
    max_batch: int = 8
    max_queue: int = 256
    step_tokens: int = 64
    cache_bytes: int = CACHE_BYTES
    watchdog_s: float = WATCHDOG_S
    strict: bool = False


class Engine:
    """Serves one model as `spec` says.

    emit: called from the engine's thread, once a step, with the events of that step. It must return quickly, and not call
    the engine. on_stuck: called by the watchdog, after it has ended the requests of a step that does not come back.
    """

    def __init__(
        self,
        model: DecodingModel,
        spec: EngineSpec = EngineSpec(),
        *,
        emit: Emit,
        on_stuck: Callable[[], None] = lambda: None,
        runner: Runner | None = None,
    ):
        self.model, self.spec = model, spec
        self._emit, self._on_stuck = emit, on_stuck
        self._runner = make_runner(model, spec) if runner is None else runner
        self._changed = threading.Condition()
        self._scheduler = Scheduler(self._runner, self._complete)
        self._unsent: list[Event] = []
        self._is_closing = self._is_stuck = False
        # When the step began that runs now, and how many were given up. A step that comes back late belongs to the past.
        self._begun_s: float | None = None
        self._num_given_up = 0
        self._seconds = dict.fromkeys(("busy_s", "schedule_s", "report_s"), 0.0)
        self._num_before = self._num_late = 0
        self._thread = threading.Thread(target=self._run, name="jaxml-engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="jaxml-engine-watchdog", daemon=True)

    @property
    def shapes(self) -> list[str]:
        """The programs that requests can need."""
        return self._runner.shapes

    def warm_up(self) -> None:
        """Compile every program that requests can need, before `start`."""
        for shape in self.shapes:
            log.info("compiling %s", shape)
        self._runner.warm_up()

    def start(self) -> None:
        """Begin to take requests from the queue."""
        self._thread.start()
        self._watchdog.start()

    def close(self) -> None:
        """Stop after the step that runs now. Requests that have not ended get an event with the error "closed".

        Raises CompiledLateError when the engine is strict and a program was compiled after the start.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for thread in (self._thread, self._watchdog):
            if thread.ident is not None:
                thread.join()
        if self.spec.strict and self._num_late:
            raise CompiledLateError(
                "the steps of the engine",
                expected="only programs that warm_up has compiled",
                got=f"{self._num_late} compiled since",
                todo="add what is missing to the runner's warm_up",
            )

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it cannot be right, QueueFullError when too many wait.

        A constraint is compiled here, which may take some tens of milliseconds.
        """
        request.sampling.checked(self.model.vocab_size)
        self.model.encode(request.prompt)
        max_tokens = self._limit(request)
        tokenizer, sampling = self.model.tokenizer, request.sampling
        if sampling.stop or sampling.constraint is not None:
            tokenizer = self.model.opened.require_tokenizer()
        progress = Progress(request, tokenizer, self.model.eos, max_tokens)
        matcher = None if sampling.constraint is None else compile_constraint(sampling.constraint, self._vocabulary)
        with self._changed:
            if request.id in self._scheduler:
                raise RequestError(
                    "id", expected="one that no running request has", got="one that runs", todo="change it"
                )
            waiting = self._scheduler.num_waiting
            if waiting >= self.spec.max_queue or self._is_closing or self._is_stuck:
                away = "the engine is closing" if self._is_closing else "the engine is stuck" if self._is_stuck else ""
                raise QueueFullError(
                    "the queue of requests",
                    expected=f"fewer than {self.spec.max_queue} waiting",
                    got=away or f"{waiting} waiting",
                    todo="try again later",
                )
            self._scheduler.add(request, progress, time.monotonic(), matcher)
            self._changed.notify_all()

    def cancel(self, id: str) -> None:
        """Forget a request. One that ended, or never was, is ignored."""
        with self._changed:
            self._scheduler.cancel(id)

    def stats(self) -> dict[str, float]:
        """Counts of requests: running, queued (and by lane) and free_places now; accepted, finished, failed, cancelled and
        preempted since the start. Tokens: num_tokens generated, num_prompt_tokens, of which num_cached_tokens were there
        already. Pages now: pages_total, pages_used, pages_cached. num_steps; busy_s, seconds spent in steps, of which
        schedule_s planning and noting results and report_s making and sending events; compiles after the warm-up; stuck: 1
        while a step does not come back."""
        with self._changed:
            return {
                **self._scheduler.stats(),
                **self._seconds,
                "compiles": self._num_late,
                "stuck": int(self._is_stuck),
            }

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.model.opened.require_tokenizer(), self.model.vocab_size, self.model.eos)

    def _limit(self, request: Request) -> int:
        """The most tokens that can be generated for a request. Raises RequestError for a prompt that does not fit."""
        if request.wants_embedding and len(request.prompt) == self.model.context_length:
            return 0
        limit = self.model.limit(request)
        room = self._runner.num_pages * self._runner.page_size - len(request.prompt)
        if room < 1:
            raise RequestError(
                "prompt",
                expected=f"at most {room + len(request.prompt) - 1} tokens: the cache has room for one more",
                got=f"{len(request.prompt)} tokens",
                todo="shorten it, or start the engine with a larger cache",
            )
        return min(limit, room)

    def _complete(self, seat: Seat, event: Event) -> Event:
        if not seat.request.wants_receipt:
            return event
        return replace(event, receipt=receipt_of(self.model, self.spec, seat))

    def _run(self) -> None:
        self._num_before = num_compiled()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._scheduler.is_busy or self._is_closing)
                if self._is_closing:
                    self._unsent += self._scheduler.fail_all("closed")
                    self._send()
                    return
            try:
                self._step()
            except Exception as error:  # The device's errors have no common class; the requests that run are lost.
                log.error("a step failed: %s; its requests end", type(error).__name__)
                with self._changed:
                    self._unsent += self._scheduler.fail_all("internal", "the step failed", running_only=True)
                    self._start_over()
                    self._send()

    def _step(self) -> None:
        with self._changed:
            begun_s = self._begun_s = time.monotonic()
            num_given_up = self._num_given_up
            spans, num_steps, events = self._scheduler.plan(begun_s)
            self._unsent += events
            planned_s = time.monotonic()
        outcomes = self._runner.run(spans, num_steps) if spans else []
        with self._changed:
            computed_s = time.monotonic()
            if num_given_up != self._num_given_up:
                self._start_over()
            else:
                self._unsent += self._scheduler.take(spans, outcomes)
            taken_s = time.monotonic()
            self._send()
            self._begun_s = None
            ended_s = time.monotonic()
            self._seconds["schedule_s"] += planned_s - begun_s + taken_s - computed_s
            self._seconds["report_s"] += ended_s - taken_s
            self._seconds["busy_s"] += ended_s - begun_s
            self._num_late = num_compiled() - self._num_before
            if self.spec.strict and self._num_late:
                self._unsent += self._scheduler.fail_all("internal", "a program was compiled while requests waited")
                self._is_closing = True

    def _start_over(self) -> None:
        """After a step whose results are lost, and no request has a row: nothing on the device means anything."""
        self._runner.reset()
        self._scheduler.reset()
        self._begun_s, self._is_stuck = None, False

    def _send(self) -> None:
        events, self._unsent = self._unsent, []
        if events:
            self._emit(events)

    def _watch(self) -> None:
        """A step that does not come back must not keep those who wait for it."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._is_closing, timeout=min(1.0, self.spec.watchdog_s / 4)):
                begun_s = self._begun_s
                if begun_s is None or self._is_stuck or time.monotonic() - begun_s < self.spec.watchdog_s:
                    continue
                log.error("a step takes longer than %g s; all requests end", self.spec.watchdog_s)
                self._is_stuck = True
                self._num_given_up += 1
                self._unsent += self._scheduler.fail_all("stuck", "a step did not come back")
                self._send()
                self._on_stuck()


def make_runner(model: DecodingModel, spec: EngineSpec) -> FastRunner | FlatRunner:
    """The runner of an engine: with pages for every row's whole context, or for `spec.cache_bytes` if that is less.

    Raises RequestError for a cache that does not hold one page a row.
    """
    full = spec.max_batch * -(-model.context_length // PAGE_SIZE)
    policy, decoder = model.bound.policy, model.bound.spec
    num_pages = min(full, spec.cache_bytes // page_bytes(decoder, PAGE_SIZE, policy.compute))  # type: ignore[arg-type]
    if num_pages < spec.max_batch:
        raise RequestError(
            "cache_bytes",
            expected=f"room for a page of {PAGE_SIZE} tokens for each of {spec.max_batch} requests",
            got=f"{spec.cache_bytes}, which holds {num_pages}",
            todo="raise it, or lower max_batch",
        )
    if spec.mode == "fast":
        return FastRunner(model, max_rows=spec.max_batch, num_pages=num_pages)
    num_tokens = max(spec.step_tokens, spec.max_batch + PAGE_SIZE)
    return FlatRunner(model, max_rows=spec.max_batch, num_pages=num_pages, num_tokens=num_tokens)
