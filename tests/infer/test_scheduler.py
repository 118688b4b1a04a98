"""The scheduler against an oracle, over a device that answers right only where pages, places and positions are right.

Random arrivals, lanes, tenants, cancellations, deadlines, poisoned prompts, cache sizes, piece sizes and lost steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxml.infer.constraints import ConstraintError, Matcher
from jaxml.infer.progress import Progress
from jaxml.infer.request import LANES, Deadlines, Event, Request, Sampling
from jaxml.infer.scheduler import Scheduler
from tests.infer.text_device import EOS, POISON, DeviceLostError, TextDevice, expected

PAGE = 4


def submit(scheduler: Scheduler, request: Request, now_s: float = 0.0, matcher=None) -> None:
    max_tokens = request.sampling.max_tokens
    assert max_tokens is not None
    scheduler.add(request, Progress(request, None, (EOS,), max_tokens), now_s, matcher)


def step(scheduler: Scheduler, now_s: float = 0.0) -> list[Event]:
    """What the engine's thread does, without a thread."""
    spans, num_steps, events = scheduler.plan(now_s)
    try:
        return events + scheduler.take(spans, scheduler.runner.run(spans, num_steps) if spans else [])
    except DeviceLostError:
        events += scheduler.fail_all("internal", running_only=True)
        scheduler.runner.reset()
        scheduler.reset()
        return events


def finish(scheduler: Scheduler) -> dict[str, list[Event]]:
    events: dict[str, list[Event]] = {}
    for _ in range(10_000):
        if not scheduler.is_busy:
            return events
        for event in step(scheduler):
            events.setdefault(event.id, []).append(event)
    raise AssertionError("the scheduler does not come to an end")


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def answer_of(request: Request) -> list[int]:
    tokens = expected(request.prompt, request.sampling.seed or 0, request.sampling.max_tokens or 0)
    return tokens[:-1] if tokens[-1] == EOS else tokens


def assert_empty(scheduler: Scheduler) -> None:
    """Every row and every page is free again."""
    stats = scheduler.stats()
    assert (stats["running"], stats["queued"], stats["pages_used"]) == (0, 0, 0)
    assert stats["free_places"] == scheduler.runner.max_rows
    ended = stats["finished"] + stats["failed"] + stats["cancelled"]
    assert stats["accepted"] == ended


@dataclass(frozen=True)
class Arrival:
    request: Request
    at: int
    cancelled_at: int | None


# (prompt, max_tokens, seed, lane, tenant, seconds in all, when it comes, when it is cancelled)
ARRIVALS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([1, 2, 3, POISON, 1, 2, 3, 1, 2]), min_size=1, max_size=14),
        st.integers(1, 12),
        st.integers(0, 2),
        st.sampled_from(LANES),
        st.sampled_from("abc"),
        st.sampled_from([None, None, 3.0, 30.0]),
        st.integers(0, 12),
        st.none() | st.integers(0, 30),
    ),
    min_size=1,
    max_size=9,
)


def arrival_of(prompt, max_tokens, seed, lane, tenant, total_s, at, cancelled_at) -> Arrival:
    sampling = Sampling(max_tokens=max_tokens, seed=seed)
    return Arrival(Request("", tuple(prompt), sampling, lane, tenant, Deadlines(total_s=total_s)), at, cancelled_at)


@settings(max_examples=60)
@given(
    ARRIVALS,
    st.integers(1, 4),
    st.integers(7, 20),
    st.sampled_from([4, 8, 32]),
    st.sampled_from([1, 3]),
    st.lists(st.integers(1, 30), max_size=2),
)
def test_every_request_ends_once_with_the_answer_it_would_get_alone(drawn, rows, num_pages, most, steps, failures):
    arrivals = [arrival_of(*values) for values in drawn]
    device = TextDevice(rows, num_pages, PAGE, most=max(most, rows + PAGE), steps=steps, failures=failures)
    scheduler = Scheduler(device)
    events: dict[str, list[Event]] = {str(index): [] for index in range(len(arrivals))}
    cancelled: set[str] = set()
    for now in range(2000):
        for index, arrival in enumerate(arrivals):
            id = str(index)
            if arrival.at == now:
                submit(scheduler, replace(arrival.request, id=id), float(now))
            if arrival.cancelled_at == now and scheduler.cancel(id):
                cancelled.add(id)
        for event in step(scheduler, float(now)):
            assert event.id not in cancelled, "an event after the cancellation"
            events[event.id].append(event)
        if now > 40 and not scheduler.is_busy:
            break
    assert_empty(scheduler)
    for id, arrival in zip(events, arrivals, strict=True):
        reasons = [event.finish_reason for event in events[id] if event.finish_reason]
        if id in cancelled:
            assert reasons == []
            continue
        assert len(reasons) == 1
        assert events[id][-1].finish_reason is not None
        right, got = answer_of(arrival.request), tokens_of(events[id])
        if reasons == ["error"]:
            assert events[id][-1].error in ("deadline", "non_finite", "internal")
            assert (events[id][-1].error == "non_finite") <= (POISON in arrival.request.prompt)
            assert got == right[: len(got)] or POISON in arrival.request.prompt
        else:
            assert POISON not in arrival.request.prompt
            assert got == right


def test_pages_of_another_prompt_are_used_and_the_last_token_is_computed_all_the_same():
    device = TextDevice(2, 20, PAGE, most=32)
    scheduler = Scheduler(device)
    sampling = Sampling(max_tokens=3, seed=1)
    prompt = (1, 2, 3, 1, 2, 3, 1, 2)
    submit(scheduler, Request("first", prompt, sampling))
    alone = finish(scheduler)["first"]
    assert alone[0].num_cached == 0
    before = device.num_computed
    submit(scheduler, Request("second", prompt, sampling))
    again = finish(scheduler)["second"]
    assert (again[0].num_cached, tokens_of(again)) == (PAGE, tokens_of(alone))
    assert device.num_computed - before == len(prompt) - PAGE + 2
    submit(scheduler, Request("longer", (*prompt, 1), sampling))
    assert finish(scheduler)["longer"][0].num_cached == 2 * PAGE


def test_a_small_cache_sends_the_latest_of_the_slowest_lane_back_and_it_goes_on_later():
    device = TextDevice(3, 8, PAGE, most=32)
    scheduler = Scheduler(device)
    sampling = Sampling(max_tokens=16, seed=4, ignore_eos=True)
    requests = [
        Request("batch", (1, 1), sampling, lane="batch"),
        Request("early", (2, 2), sampling),
        Request("late", (3, 3), sampling),
    ]
    order = []
    for request in requests:
        submit(scheduler, replace(request, sampling=replace(sampling, ignore_eos=True)))
    events: dict[str, list[Event]] = {}
    while scheduler.is_busy:
        for event in step(scheduler):
            events.setdefault(event.id, []).append(event)
            if event.finish_reason:
                order.append(event.id)
    assert scheduler.counts["preempted"] > 0
    assert order[-1] == "batch"
    for request in requests:
        assert tokens_of(events[request.id]) == answer_of(request)
    assert_empty(scheduler)


@pytest.mark.parametrize(
    ("deadlines", "told"),
    [
        (Deadlines(queue_s=2.0), "in the queue"),
        (Deadlines(first_token_s=2.0), "to the first token"),
        (Deadlines(total_s=2.0), "in all"),
    ],
)
def test_a_deadline_in_the_queue_ends_a_request_and_nobody_else(deadlines, told):
    scheduler = Scheduler(TextDevice(1, 20, PAGE))
    submit(scheduler, Request("runs", (1, 2), Sampling(max_tokens=8, seed=11)))
    submit(scheduler, Request("waits", (1, 2), Sampling(max_tokens=8, seed=1), deadlines=deadlines), 0.0)
    assert [event.id for event in step(scheduler, 1.9)] == ["runs"]
    ended = [event for event in step(scheduler, 2.0) if event.id == "waits"]
    assert [(event.error, told in event.detail) for event in ended] == [("deadline", True)]
    assert finish(scheduler)["runs"][-1].finish_reason == "length"
    assert_empty(scheduler)


def test_a_deadline_of_the_queue_or_the_first_token_is_met_once_there_is_one():
    scheduler = Scheduler(TextDevice(1, 20, PAGE))
    deadlines = Deadlines(queue_s=2.0, first_token_s=3.0, total_s=50.0)
    request = Request("a", (1, 2), Sampling(max_tokens=8, seed=11), deadlines=deadlines)
    submit(scheduler, request, 0.0)
    assert step(scheduler, 1.0)[0].queue_s == 1.0
    events = step(scheduler, 9.0)
    assert not events[0].error
    assert step(scheduler, 50.0)[0].error == "deadline"


class Stubborn(Matcher):
    """A matcher that allows everything, is complete after `length` tokens, and fails at token number `fails_at`."""

    def __init__(self, length: int, fails_at: int = -1, fails_in: str = "advance"):
        self.length, self.fails_at, self.fails_in, self.seen = length, fails_at, fails_in, []

    @property
    def is_finished(self) -> bool:
        return len(self.seen) >= self.length

    def mask(self) -> np.ndarray:
        self._maybe_fail("mask")
        return np.full(2, 2**32 - 1, np.uint32)

    def advance(self, tokens) -> None:
        self.seen += tokens
        self._maybe_fail("advance")

    def _maybe_fail(self, where: str) -> None:
        if where == self.fails_in and len(self.seen) == self.fails_at:
            raise ConstraintError("the grammar", expected="a token", got="its limits", todo="ask for less")


def test_an_answer_ends_where_its_grammar_is_complete_and_fails_alone_where_it_cannot_go_on():
    scheduler = Scheduler(TextDevice(4, 30, PAGE, steps=3))
    sampling = Sampling(max_tokens=8, seed=11)
    matchers = {"whole": Stubborn(3), "advance": Stubborn(9, 2), "mask": Stubborn(9, 2, "mask")}
    for id, matcher in matchers.items():
        submit(scheduler, Request(id, (1, 2), sampling), matcher=matcher)
    submit(scheduler, Request("free", (1, 2), sampling))
    events = finish(scheduler)
    assert (tokens_of(events["whole"]), events["whole"][-1].finish_reason) == (
        answer_of(Request("", (1, 2), sampling))[:3],
        "stop",
    )
    assert [events[id][-1].error for id in ("advance", "mask")] == ["constraint", "constraint"]
    assert tokens_of(events["free"]) == answer_of(Request("", (1, 2), sampling))
    assert_empty(scheduler)


def test_a_result_for_a_place_that_has_gone_to_another_is_dropped():
    """The place is free as soon as `cancel` returns, though the device still computes for the one who left."""
    scheduler = Scheduler(TextDevice(1, 20, PAGE))
    submit(scheduler, Request("leaves", (1, 2), Sampling(max_tokens=8, seed=1)))
    spans, num_steps, _ = scheduler.plan(0.0)
    assert scheduler.cancel("leaves")
    assert not scheduler.cancel("leaves")
    assert scheduler.stats()["free_places"] == 1
    submit(scheduler, Request("comes", (2, 3), Sampling(max_tokens=4, seed=2)))
    late = scheduler.runner.run(spans, num_steps)
    scheduler.plan(0.0)
    assert scheduler.take(spans, late) == []
    assert tokens_of(finish(scheduler)["comes"]) == answer_of(Request("", (2, 3), Sampling(max_tokens=4, seed=2)))
