"""Many requests at once, from any thread, in-process: a queue in front of a batch that one thread steps. No HTTP.

Reads `infer.batch`, `infer.decoding_model` and `infer.request`; `serve` puts a socket in front of it.

Every accepted request ends in exactly one event with a finish reason, unless it was cancelled: then it has no event after
`cancel` has returned. The thread that steps owns all device state; the lock guards the queue and the counts only, so
submitting and cancelling never wait for the device.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable

from jaxml.errors import JaxmlError, QueueFullError, RequestError
from jaxml.infer.batch import Batch
from jaxml.infer.decoding_model import DecodingModel
from jaxml.infer.request import Event, Request

log = logging.getLogger(__name__)

Emit = Callable[[list[Event]], None]


class Engine:
    """At most `max_batch` requests decode together; at most `max_queue` more wait, first come, first served.

    emit: called from the engine's thread, once a step, with the events of that step. It must return quickly.
    """

    def __init__(self, model: DecodingModel, *, emit: Emit, max_batch: int = 8, max_queue: int = 256):
        self.model, self.max_batch, self.max_queue = model, max_batch, max_queue
        self._emit = emit
        self._batch = Batch(model, max_batch)
        self._changed = threading.Condition()
        self._queue: deque[Request] = deque()
        self._known: set[str] = set()  # queued or in the batch, and not cancelled
        self._cancelled: set[str] = set()  # in the batch until the next step
        self._counts: Counter[str] = Counter()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="jaxml-engine", daemon=True)

    def warm_up(self) -> int:
        """Compile every program that requests can need, before `start`; returns their number."""
        return self._batch.warm_up()

    def start(self) -> None:
        """Begin to take requests from the queue."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the step that runs now. Requests that have not ended get an event with the reason "error"."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it cannot be right, QueueFullError when too many wait."""
        request.sampling.checked(self.model.vocab_size)
        self.model.encode(request.prompt)
        self.model.limit(request)
        if request.sampling.stop:
            self.model.opened.require_tokenizer()
        with self._changed:
            if request.id in self._known or request.id in self._cancelled:
                raise RequestError(
                    "id", expected="one that no running request has", got="one that runs", todo="change it"
                )
            if len(self._queue) >= self.max_queue or self._is_closing:
                raise QueueFullError(
                    "the queue of requests",
                    expected=f"fewer than {self.max_queue} waiting",
                    got="the engine is closing" if self._is_closing else f"{len(self._queue)} waiting",
                    todo="try again later",
                )
            self._queue.append(request)
            self._known.add(request.id)
            self._counts["accepted"] += 1
            self._changed.notify()

    def cancel(self, id: str) -> None:
        """Forget a request. One that ended, or never was, is ignored. The place of a running one is free after the step
        that runs now."""
        with self._changed:
            if id not in self._known:
                return
            self._known.remove(id)
            self._counts["cancelled"] += 1
            for request in self._queue:
                if request.id == id:
                    self._queue.remove(request)
                    return
            self._cancelled.add(id)
            self._changed.notify()

    def stats(self) -> dict[str, int]:
        """Counts of requests: running (joining ones too), queued and free_places now; accepted, finished, failed and
        cancelled since the start; num_tokens generated, num_steps taken."""
        with self._changed:
            queued = len(self._queue)
            in_batch = len(self._known) - queued + len(self._cancelled)
            totals = {name: self._counts[name] for name in ("accepted", "finished", "failed", "cancelled")}
            sizes = {"num_tokens": self._counts["num_tokens"], "num_steps": self._counts["num_steps"]}
        return {"running": in_batch, "queued": queued, "free_places": self.max_batch - in_batch, **totals, **sizes}

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._queue or self._cancelled or self._batch.is_busy or self._is_closing
                )
                if self._is_closing:
                    break
                for id in self._cancelled:
                    self._batch.remove(id)
                self._cancelled.clear()
                taken = [self._queue.popleft() for _ in range(min(self._batch.num_places, len(self._queue)))]
            self._report(self._step(taken))
        with self._changed:
            rest, self._queue = list(self._known), deque()
        self._report([Event(id, finish_reason="error", error="the engine was closed") for id in rest])

    def _step(self, taken: list[Request]) -> list[Event]:
        """Add what was taken and step once. An error ends the requests it concerns, and none that come later."""
        failed = []
        for request in taken:
            try:
                self._batch.add(request)
            except JaxmlError as error:
                failed.append(Event(request.id, finish_reason="error", error=type(error).__name__))
        try:
            return failed + self._batch.step()
        except Exception as error:  # The device's errors have no common class; the requests in the batch are lost.
            log.error("a step failed: %s; its requests end", type(error).__name__)
            self._batch = Batch(self.model, self.max_batch)
            with self._changed:
                queued = {request.id for request in self._queue}
                lost = self._known - queued - {event.id for event in failed}
                self._cancelled.clear()
            return failed + [Event(id, finish_reason="error", error="the step failed") for id in lost]

    def _report(self, events: list[Event]) -> None:
        with self._changed:
            self._counts["num_steps"] += 1
            events = [event for event in events if event.id in self._known]
            for event in events:
                self._counts["num_tokens"] += len(event.tokens)
                if event.finish_reason is not None:
                    self._known.remove(event.id)
                    self._counts["failed" if event.finish_reason == "error" else "finished"] += 1
            if events:
                self._emit(events)
