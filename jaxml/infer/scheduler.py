"""What the engine computes next, and what came of it: requests join and leave between steps. No jax, no thread, no clock.

Reads `infer.constraints`, `infer.pages`, `infer.progress`, `infer.queueing`, `infer.request` and `infer.work`;
`infer.engine` runs it in a thread, `infer.language_model` for scripts, and simulations with a clock and a device of their
own. Time is an argument, in seconds of any clock that does not go back.

A step: `plan` ends what is overdue, lets waiting requests join while there are rows and pages, and says which tokens to
compute; the caller has a `Runner` compute them; `take` makes events of the results. A request's tokens so far (prompt and
answer) are known here, so one whose pages are needed by others goes back into the queue and is computed again later.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxml.infer.constraints import ConstraintError, Matcher
from jaxml.infer.pages import Pages
from jaxml.infer.progress import Progress, logprobs_of
from jaxml.infer.queueing import Deadlines, Queues
from jaxml.infer.request import LANES, MAX_SEED, ErrorKind, Event, Request, TokenLogprob
from jaxml.infer.work import Outcome, Runner, Side, Span


@dataclass(eq=False)
class Seat:
    """One request from its arrival to its end.

    tokens: of the prompt and of the answer so far; the keys and values of the first `num_cached` are in `pages`. place: its
    row, -1 while it waits. order: the place in line of those that were accepted.
    """

    request: Request
    progress: Progress
    seed: int
    came_s: float
    order: int
    matcher: Matcher | None = None
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_found: int = 0
    place: int = -1
    queue_s: float | None = None
    has_told: bool = False
    scores: list[TokenLogprob] = field(default_factory=list)
    features: np.ndarray | None = None

    @property
    def max_tokens(self) -> int:
        """The most tokens of the answer."""
        return self.progress.max_tokens

    @property
    def side(self) -> Side | None:
        """What is still to be computed beside the next token: once, with the prompt."""
        if self.request.wants_embedding:
            return "features"
        wants = self.request.sampling.num_prompt_logprobs is not None and not self.has_told
        return "scores" if wants else None

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.tokens) - self.num_cached

    @property
    def rank(self) -> tuple[int, int]:
        """Whose pages are taken first: the largest."""
        return LANES.index(self.request.lane), self.order


class Scheduler:
    """At most `runner.max_rows` requests have a row, and all of them together `runner.num_pages` pages.

    complete: makes the last event of a request from its seat and what `Progress` says (a receipt is added there).
    """

    def __init__(self, runner: Runner, complete: Callable[[Seat, Event], Event] = lambda seat, event: event):
        self.runner = runner
        self.counts: Counter[str] = Counter()
        self._complete = complete
        self.pages = Pages(runner.num_pages, runner.page_size)
        self._queues: Queues[Seat] = Queues()
        self._deadlines = Deadlines()
        self._seats: dict[str, Seat] = {}  # those that wait and those that have a row
        self._running: dict[str, Seat] = {}
        self._free_places = list(range(runner.max_rows - 1, -1, -1))
        self._num_accepted = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queues)

    @property
    def is_busy(self) -> bool:
        return bool(self._seats)

    def __contains__(self, id: str) -> bool:
        return id in self._seats

    def add(self, request: Request, progress: Progress, now_s: float, matcher: Matcher | None = None) -> None:
        """Let a request wait. It is checked, and `progress.max_tokens` is a ceiling that fits."""
        seed = request.sampling.seed
        seat = Seat(
            request,
            progress,
            secrets.randbelow(MAX_SEED + 1) if seed is None else seed,
            now_s,
            self._num_accepted,
            matcher,
            list(request.prompt),
        )
        self._num_accepted += 1
        self._seats[request.id] = seat
        self.counts["accepted"] += 1
        self._wait(seat)
        limits = request.deadlines
        for limit_s in {limits.queue_s, limits.first_token_s, limits.total_s} - {None}:
            self._deadlines.add(now_s + limit_s, request.id)  # type: ignore[operator]

    def cancel(self, id: str) -> bool:
        """Forget a request, wherever it is; its place and its pages are free at once. False when it is not here."""
        seat = self._seats.pop(id, None)
        if seat is None:
            return False
        self._leave(seat)
        self.counts["cancelled"] += 1
        return True

    def plan(self, now_s: float) -> tuple[list[Span], int, list[Event]]:
        """(what to compute, how many tokens to draw for rows that decode, events of requests that ended without)."""
        events = self._expire(now_s)
        self._admit(now_s)
        decoding = [seat for seat in self._running.values() if seat.num_left == 1 and seat.side is None]
        joining = [seat for seat in self._running.values() if seat.num_left > 1 or seat.side is not None]
        num_steps = 1
        if decoding and not joining and not any(seat.matcher for seat in decoding):
            num_steps = self.runner.num_steps(len(decoding))
        num_steps = self._grow(decoding, num_steps)
        decoding = [seat for seat in decoding if seat.place >= 0]
        joining = sorted((seat for seat in joining if seat.place >= 0), key=lambda seat: seat.order)
        wanted = [(seat, 1) for seat in decoding]
        shares = self.runner.shares(len(decoding), [seat.num_left for seat in joining]) if joining else []
        for seat, share in zip(joining, shares, strict=True):
            if share:
                wanted.append((seat, share if seat.side is None else min(seat.num_left, self.runner.side_tokens)))
        spans = []
        for seat, num_tokens in wanted:
            try:
                spans.append(self._span(seat, num_tokens))
            except ConstraintError as error:
                events.append(self._end(seat, "constraint", error.faults[0].got))
        return spans, num_steps, events

    def take(self, spans: Sequence[Span], outcomes: Sequence[Outcome]) -> list[Event]:
        """What the results of a plan mean. Requests that were cancelled meanwhile have none."""
        by_place = {seat.place: seat for seat in self._running.values()}
        events = []
        self.counts["num_steps"] += 1
        for span, outcome in zip(spans, outcomes, strict=True):
            seat = by_place.get(span.place)
            if seat is None or seat.order != span.ticket:  # cancelled, whoever has the place now
                continue
            event = self._advance(seat, span, outcome)
            if event is not None:
                events.append(event)
        return events

    def fail_all(self, error: ErrorKind, detail: str = "", *, running_only: bool = False) -> list[Event]:
        """End every request with an error, or every one that has a row."""
        seats = list((self._running if running_only else self._seats).values())
        return [self._end(seat, error, detail) for seat in seats]

    def reset(self) -> None:
        """After the device has lost its state: no row is held, and no page means anything. Nothing may be running."""
        self.pages = Pages(self.runner.num_pages, self.runner.page_size)

    def stats(self) -> dict[str, float]:
        """Counts: see `Engine.stats`."""
        names = ("accepted", "finished", "failed", "cancelled", "preempted", "num_steps")
        names += ("num_tokens", "num_prompt_tokens", "num_cached_tokens")
        lanes = {f"queued_{lane}": self._queues.num_in(lane) for lane in LANES}
        held = {"pages_total": self.pages.num_pages, "pages_used": self.pages.num_held}
        now = {"running": len(self._running), "queued": self.num_waiting, "free_places": len(self._free_places)}
        return {**now, **lanes, **{n: self.counts[n] for n in names}, **held, "pages_cached": self.pages.num_kept}

    def _wait(self, seat: Seat, is_back: bool = False) -> None:
        request = seat.request
        self._queues.push(
            request.id, seat, lane=request.lane, tenant=request.tenant, came_s=seat.came_s, is_back=is_back
        )

    def _expire(self, now_s: float) -> list[Event]:
        events = []
        while (id := self._deadlines.pop(now_s)) is not None:
            seat = self._seats.get(id)
            if seat is None:
                continue
            limits, is_waiting = seat.request.deadlines, seat.queue_s is None
            over = [
                name
                for name, limit_s, counts in (
                    ("in the queue", limits.queue_s, is_waiting),
                    ("to the first token", limits.first_token_s, not seat.has_told),
                    ("in all", limits.total_s, True),
                )
                if counts and limit_s is not None and now_s >= seat.came_s + limit_s
            ]
            if over:
                events.append(self._end(seat, "deadline", f"its time {over[0]} is over"))
        return events

    def _admit(self, now_s: float) -> None:
        while self._free_places and (seat := self._queues.peek()) is not None:
            found = [] if seat.side is not None else self.pages.match(seat.tokens)
            missing = self.pages.num_needed(len(seat.tokens)) - len(found)
            # One page for each that runs: else a request that joins would be sent away at their next page.
            if missing + len(self._running) > self.pages.num_available and self._running:
                self.pages.release(found)
                return
            taken = self.pages.take(missing)
            assert taken is not None, "a request that does not fit alone is refused when it comes"
            self._queues.pop()
            seat.pages, seat.num_cached = found + taken, len(found) * self.pages.page_size
            seat.place = self._free_places.pop()
            self._running[seat.request.id] = seat
            if seat.queue_s is None:
                seat.queue_s, seat.num_found = now_s - seat.came_s, seat.num_cached
                self.counts["num_prompt_tokens"] += len(seat.request.prompt)
                self.counts["num_cached_tokens"] += seat.num_cached
                self._queues.charge(seat.request.tenant, len(seat.request.prompt) - seat.num_cached)
            answer = seat.tokens[len(seat.request.prompt) :]
            self.runner.join(seat.place, seat.request, seat.seed, answer, seat.max_tokens)

    def _grow(self, decoding: Sequence[Seat], num_steps: int) -> int:
        """Give each row the pages for its next tokens, if need be those of others; returns for how many tokens."""

        def missing(seat: Seat, steps: int) -> int:
            last = min(len(seat.tokens) + steps - 1, len(seat.request.prompt) + seat.max_tokens)
            return max(0, self.pages.num_needed(last) - len(seat.pages))

        if num_steps > 1 and sum(missing(seat, num_steps) for seat in decoding) > self.pages.num_available:
            num_steps = 1
        for seat in sorted(decoding, key=lambda seat: seat.rank):
            while seat.place >= 0:
                more = self.pages.take(missing(seat, num_steps))
                if more is not None:
                    seat.pages += more
                    break
                self._preempt(max(self._running.values(), key=lambda other: other.rank))
        return num_steps

    def _preempt(self, seat: Seat) -> None:
        """Send a request back into the queue, in front of those of its tenant; its pages are kept while they can be."""
        self.counts["preempted"] += 1
        self._leave(seat)
        seat.features, seat.scores = None, []
        self._wait(seat, is_back=True)

    def _span(self, seat: Seat, num_tokens: int) -> Span:
        end = seat.num_cached + num_tokens
        draws = end == len(seat.tokens) and seat.side != "features" and seat.max_tokens > 0
        return Span(
            seat.place,
            seat.tokens[seat.num_cached : end],
            seat.num_cached,
            tuple(seat.pages),
            draws=draws,
            allowed=seat.matcher.mask() if draws and seat.matcher is not None else None,
            side=seat.side,
            targets=seat.tokens[seat.num_cached + 1 : end + 1] if seat.side == "scores" else (),
            ticket=seat.order,
        )

    def _advance(self, seat: Seat, span: Span, outcome: Outcome) -> Event | None:
        """A request after one of its spans; its event, if it has one."""
        if not outcome.is_finite:
            return self._end(seat, "non_finite", "the model gave a value that is infinite or not a number")
        seat.num_cached += max(len(span.tokens), len(outcome.tokens))
        if span.side == "features":
            assert outcome.features is not None
            seat.features = outcome.features if seat.features is None else seat.features + outcome.features
        if span.side == "scores":
            assert outcome.scores is not None
            num_top = seat.request.sampling.num_prompt_logprobs or 0
            seat.scores += logprobs_of(span.targets, Outcome((), *outcome.scores), num_top)
        if seat.num_left > 0:
            return None
        if span.side == "features":
            return self._embedding(seat)
        first, is_complete = not seat.has_told, False
        if first and self._can_share(seat):
            seat.pages = self.pages.share(seat.tokens, seat.pages)
        seat.tokens += outcome.tokens
        if seat.matcher is not None:
            try:
                seat.matcher.advance(outcome.tokens)
            except ConstraintError as error:
                return self._end(seat, "constraint", error.faults[0].got)
            is_complete = seat.matcher.is_finished
        event = seat.progress.take(outcome, is_complete)
        self.counts["num_tokens"] += len(outcome.tokens)
        self._queues.charge(seat.request.tenant, len(outcome.tokens))
        if first:
            seat.has_told = True
            event = replace(event, queue_s=seat.queue_s, num_cached=seat.num_found, prompt_logprobs=tuple(seat.scores))
        if event.finish_reason is not None:
            event = self._complete(seat, event)
            self._finish(seat, "finished")
        return event

    def _embedding(self, seat: Seat) -> Event:
        assert seat.features is not None
        length = float(np.linalg.norm(seat.features)) or 1.0
        values = tuple(float(value) for value in seat.features / length)
        event = Event(seat.request.id, finish_reason="stop", queue_s=seat.queue_s, embedding=values)
        self._finish(seat, "finished")
        return event

    def _can_share(self, seat: Seat) -> bool:
        """Whether its pages hold what others would have filled them with."""
        sampling = seat.request.sampling
        has_side = seat.request.wants_embedding or sampling.num_prompt_logprobs is not None
        return self.runner.shares_sides or not has_side

    def _end(self, seat: Seat, error: ErrorKind, detail: str) -> Event:
        event = Event(
            seat.request.id,
            finish_reason="error",
            num_tokens=seat.progress.num_tokens,
            error=error,
            detail=detail,
            queue_s=None if seat.has_told else seat.queue_s,
        )
        if error == "non_finite":
            self.pages.forget(seat.pages)
            seat.num_cached = 0
        self._finish(seat, "failed")
        return event

    def _finish(self, seat: Seat, how: str) -> None:
        self.counts[how] += 1
        del self._seats[seat.request.id]
        self._leave(seat)

    def _leave(self, seat: Seat) -> None:
        """Out of the queue, or off its row; what it computed stays known while there is room."""
        self._queues.remove(seat.request.id)
        if seat.place < 0:
            return
        if self._can_share(seat):
            seat.pages = self.pages.share(seat.tokens[: seat.num_cached], seat.pages)
        self.pages.release(seat.pages)
        seat.pages, seat.num_cached = [], 0
        del self._running[seat.request.id]
        self._free_places.append(seat.place)
        seat.place = -1
