"""What is counted of a service: it adds up, survives a worker, tells the truth in Prometheus' format, and stays bounded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from jaxml.infer.request import Event
from jaxml.serve.measures import MAX_WINDOW_VALUES, Histogram, Names, RecentCounts, Rising, Share, Window, quantile
from jaxml.serve.metrics import MAX_TENANTS, Metrics, Watched
from jaxml.serve.request_log import MAX_WAITING_LINES, RequestLog, line_of

STATS = {
    "running": 2, "queued": 7, "queued_interactive": 1, "queued_normal": 2, "queued_batch": 4, "free_places": 6,
    "accepted": 20, "finished": 9, "failed": 1, "cancelled": 1, "preempted": 3, "num_tokens": 500, "num_prompt_tokens": 900,
    "num_cached_tokens": 300, "num_steps": 250, "busy_s": 4.5, "compiles": 0, "pages_total": 64, "pages_used": 10,
    "pages_cached": 20,
}  # fmt: skip


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    return Metrics(["small"], 3.6, now=clock)


def samples(metrics: Metrics, stats: dict[str, dict[str, float]] | None = None) -> dict[tuple[str, ...], float]:
    """What a scrape reads: (name, label values in the order of the label names) to the value."""
    text = metrics.render({"small": STATS} if stats is None else stats).decode()
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type != "unknown", family
        for sample in family.samples:
            key = (sample.name, *(value for _, value in sorted(sample.labels.items())))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def answered(
    metrics: Metrics, clock: Clock, num_tokens: int = 5, model: str = "small", tenant: str = "acme"
) -> Watched:
    """A request of 10 prompt tokens: 0.2 s to the first token, 0.1 s for each other."""
    watched = metrics.begin(tenant, "gold")
    watched.model = model
    watched.asked(10, 1)
    clock.at += 0.2
    watched.event(Event("cmpl-a-0", (1,), "x", num_tokens=1, queue_s=0.05, num_cached=4))
    for number in range(2, num_tokens + 1):
        clock.at += 0.1
        watched.event(
            Event("cmpl-a-0", (1,), "x", num_tokens=number, finish_reason="stop" if number == num_tokens else None)
        )
    watched.end(200)
    return watched


def test_a_request_is_counted_and_timed_where_it_belongs(metrics: Metrics, clock: Clock) -> None:
    answered(metrics, clock, num_tokens=5)
    found = samples(metrics)
    assert found["jaxml_requests_total", "200", "small", "acme", "gold"] == 1
    tokens = {key[1]: value for key, value in found.items() if key[0] == "jaxml_tokens_total"}
    assert tokens == {"prompt": 10, "cached": 4, "generated": 5}
    seconds = {
        name: (
            found[f"jaxml_{name}_seconds_count", "small", "gold"],
            found[f"jaxml_{name}_seconds_sum", "small", "gold"],
        )
        for name in ("time_to_first_token", "time_per_output_token", "request_duration", "queue")
    }
    expected = {"time_to_first_token": 0.2, "time_per_output_token": 0.1, "request_duration": 0.6, "queue": 0.05}
    assert seconds == {name: (1, pytest.approx(value)) for name, value in expected.items()}


def test_choices_that_come_together_are_timed_apart(metrics: Metrics, clock: Clock) -> None:
    watched = metrics.begin("acme", "gold")
    watched.model = "small"
    watched.asked(10, 2)
    clock.at += 1.0
    watched.event(Event("cmpl-a-0", (1,), num_tokens=1))
    clock.at += 1.0
    watched.event(Event("cmpl-a-1", (1, 2, 3), num_tokens=3))
    watched.event(Event("cmpl-a-0", (), num_tokens=2, finish_reason="stop"))
    clock.at += 1.0
    watched.event(Event("cmpl-a-1", (4, 5), num_tokens=5, finish_reason="length"))
    watched.end(200)
    found = samples(metrics)
    assert found["jaxml_time_to_first_token_seconds_count", "small", "gold"] == 1
    assert found["jaxml_time_per_output_token_seconds_count", "small", "gold"] == 2
    assert found["jaxml_time_per_output_token_seconds_sum", "small", "gold"] == pytest.approx(1.0 / 1 + 1.0 / 4)
    assert found["jaxml_tokens_total", "generated", "small", "acme", "gold"] == 7


def test_what_is_refused_counts_by_its_code_and_is_not_timed(metrics: Metrics) -> None:
    metrics.begin("", "").end(401)
    watched = metrics.begin("acme", "gold")
    watched.model = "small"
    watched.asked(10, 1)
    watched.end(429)
    watched.end(200)
    found = samples(metrics)
    assert {key: value for key, value in found.items() if key[0] == "jaxml_requests_total"} == {
        ("jaxml_requests_total", "401", "none", "none", "none"): 1,
        ("jaxml_requests_total", "429", "small", "acme", "gold"): 1,
    }
    assert not any(key[0] == "jaxml_request_duration_seconds_count" for key in found)


def test_requests_that_are_open_are_counted_until_they_end_once(metrics: Metrics) -> None:
    watched = [metrics.begin("acme", "gold") for _ in range(3)]
    assert samples(metrics)["jaxml_requests_open",] == 3
    for _ in range(2):
        watched[0].end(499)
    assert samples(metrics)["jaxml_requests_open",] == 2


def test_errors_count_by_kind_and_events_after_the_end_do_not(metrics: Metrics) -> None:
    watched = metrics.begin("acme", "gold")
    watched.model = "small"
    watched.event(Event("cmpl-a-0", finish_reason="error", error="deadline"))
    watched.event(Event("cmpl-a-1", finish_reason="error", error="non_finite"))
    watched.end(504)
    watched.event(Event("cmpl-a-2", finish_reason="error", error="lost"))
    errors = {key[1:]: value for key, value in samples(metrics).items() if key[0] == "jaxml_errors_total"}
    assert errors == {("deadline", "small"): 1, ("non_finite", "small"): 1}
    assert metrics.summary({})["errors"] == {"deadline": 1, "non_finite": 1}


def test_no_client_makes_the_number_of_time_series_grow(metrics: Metrics, clock: Clock) -> None:
    for number in range(4 * MAX_TENANTS):
        answered(metrics, clock, num_tokens=1, model=f"model-{number}", tenant=f"tenant-{number}")
        watched = metrics.begin("acme", f"tier-{number}")
        watched.end(100 + number)
    found = samples(metrics)
    requests = [key for key in found if key[0] == "jaxml_requests_total"]
    assert {key[2] for key in requests} == {"other", "none"}
    assert len({key[3] for key in requests}) == MAX_TENANTS + 1
    assert len(found) < 5 * MAX_TENANTS + 500
    assert Names(["a"])("b") == "other" and Names(["a"])("a") == "a" and Names()("") == "none"


def test_names_that_mean_something_to_the_format_come_back_as_they_were(clock: Clock) -> None:
    tenant = 'a"b\\c\nd} 7'
    metrics = Metrics(["small"], now=clock)
    answered(metrics, clock, tenant=tenant)
    assert samples(metrics)["jaxml_requests_total", "200", "small", tenant, "gold"] == 1


def test_the_engine_says_what_it_holds_and_its_counters_survive_its_end(metrics: Metrics) -> None:
    first = samples(metrics, {"small": STATS})
    assert first["jaxml_engine_waiting", "batch", "small"] == 4
    assert first["jaxml_engine_pages", "small", "cached"] == 20 and first["jaxml_engine_pages_capacity", "small"] == 64
    assert first["jaxml_engine_tokens_total", "cached", "small"] == 300
    down = samples(metrics, {})
    assert down["jaxml_engine_up", "small"] == 0 and ("jaxml_engine_running", "small") not in down
    assert down["jaxml_engine_tokens_total", "generated", "small"] == 500
    again = samples(metrics, {"small": {**STATS, "num_tokens": 20, "busy_s": 0.5}})
    assert again["jaxml_engine_tokens_total", "generated", "small"] == 520
    assert again["jaxml_engine_busy_seconds_total", "small"] == 5.0
    assert again["jaxml_engine_up", "small"] == 1


def test_stats_of_a_model_that_is_not_served_are_not_shown(metrics: Metrics) -> None:
    assert not any("strange" in key for key in samples(metrics, {"small": STATS, "strange": STATS}))


def test_costs_are_the_price_of_the_time_over_what_was_done_in_it(metrics: Metrics, clock: Clock) -> None:
    assert not any("cost_per" in key[0] for key in samples(metrics))
    for _ in range(4):
        answered(metrics, clock, num_tokens=5)
    metrics.begin("acme", "gold").end(401)
    clock.at = 1000.0 + 500.0
    found = samples(metrics)
    assert found["jaxml_cost_total",] == pytest.approx(3.6 * 500 / 3600)
    assert found["jaxml_cost_per_thousand_requests",] == pytest.approx(0.5 / 4 * 1e3)
    assert found["jaxml_cost_per_million_tokens",] == pytest.approx(0.5 / 20 * 1e6)
    two = Metrics(["small"], 3.6, num_devices=2, now=clock)
    clock.at += 500
    assert samples(two)["jaxml_cost_total",] == pytest.approx(1.0)
    assert not any("cost" in key[0] for key in samples(Metrics(["small"], now=clock)))


def test_the_summary_is_of_the_last_minutes(metrics: Metrics, clock: Clock) -> None:
    for _ in range(20):
        answered(metrics, clock, num_tokens=5)
    lately = metrics.summary({"small": STATS})
    assert json.loads(json.dumps(lately, allow_nan=False)) == lately
    assert lately["latency"]["time_to_first_token"] == {
        "count": 20,
        "p50": pytest.approx(0.2),
        "p95": pytest.approx(0.2),
    }
    assert lately["requests_per_s"] == pytest.approx(20 / 12.0) and lately["tokens_per_s"][
        "generated"
    ] == pytest.approx(100 / 12)
    assert lately["codes"] == {"200": 20} and lately["errors"] == {}
    assert lately["cost"]["per_hour"] == 3.6
    assert lately["cost"]["per_thousand_requests"] == pytest.approx(3.6 * 12 / 3600 / 20 * 1e3)
    engine = lately["models"]["small"]
    assert engine["waiting"] == {"interactive": 1, "normal": 2, "batch": 4} and engine["pages"] == {
        "total": 64,
        "used": 10,
        "cached": 20,
    }
    assert engine["busy_share"] == pytest.approx(4.5 / 12) and engine["cached_share"] == pytest.approx(1 / 3)
    clock.at += 400
    quiet = metrics.summary({})
    assert quiet["latency"]["time_to_first_token"] == {"count": 0, "p50": None, "p95": None}
    assert quiet["requests_per_s"] == 0 and quiet["codes"] == {} and quiet["cost"]["per_thousand_requests"] is None
    assert not quiet["models"]["small"]["is_up"]


def test_the_summary_names_no_tenant(metrics: Metrics, clock: Clock) -> None:
    answered(metrics, clock, tenant="acme")
    assert "acme" not in json.dumps(metrics.summary({"small": STATS}))


@given(st.lists(st.floats(0, 100), max_size=40))
def test_buckets_hold_every_value_once_under_its_bound(values: list[float]) -> None:
    histogram = Histogram((0.5, 1.0, 10.0))
    for value in values:
        histogram.observe(("a",), value)
    bounds = [*histogram.bounds, math.inf]
    got = histogram.cells[("a",)].cumulative() if values else [0] * 4
    assert got == [sum(value <= bound for value in values) for bound in bounds]


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5).map(sorted), min_size=1, max_size=6))
def test_a_counter_that_is_followed_never_falls_and_loses_nothing_that_was_read(lives: list[list[int]]) -> None:
    counter, seen = Rising(), [0.0]
    for life in lives:
        seen += [counter.follow(value) for value in life]
    assert seen == sorted(seen)
    # A life that begins where the one before ended cannot be told from it.
    told_apart = sum(life[-1] for life, after in zip(lives, [*lives[1:], [0]], strict=True) if after[0] < life[-1])
    assert told_apart <= counter.value <= sum(life[-1] for life in lives)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_one_of_the_values_with_that_share_at_or_below_it(values: list[float], share: float) -> None:
    got = quantile(values, share)
    assert got in values
    assert sum(value <= got for value in values) >= share * len(values) - 1e-9
    assert sum(value < got for value in values) < share * len(values) + 1e-9


def test_what_is_kept_for_the_page_is_bounded(clock: Clock) -> None:
    window, counts, share = Window(60, clock), RecentCounts(60, clock), Share(60, clock)
    for number in range(3 * MAX_WINDOW_VALUES):
        clock.at += 1e-3 if number % 2 else 0.1
        window.add(float(number))
        counts.add("a")
        share.follow({"a": float(number)})
    assert len(window.values()) <= MAX_WINDOW_VALUES and window.values()[-1] == 3 * MAX_WINDOW_VALUES - 1
    assert len(counts._slices) <= 61 and len(share._readings) <= 62
    clock.at += 61
    assert window.values() == [] and counts.totals() == {}


def test_a_share_is_measured_over_the_last_minute(clock: Clock) -> None:
    share, busy_s = Share(60, clock), 0.0
    for _ in range(100):
        clock.at, busy_s = clock.at + 5, busy_s + 5
        assert share.follow({"a": busy_s}) == {"a": pytest.approx(1.0)}
    clock.at += 30
    assert share.follow({"a": busy_s}) == {"a": pytest.approx(0.5)}
    clock.at += 35
    assert share.follow({"a": busy_s}) == {"a": pytest.approx(0.0)}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RequestLog]:
    log = RequestLog.to_file(tmp_path / "requests.jsonl")
    yield log
    log.close()


def lines(log: RequestLog, path: Path) -> list[dict[str, Any]]:
    log.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_request_leaves_one_line_of_ids_counts_and_durations(tmp_path: Path, log: RequestLog, clock: Clock) -> None:
    metrics = Metrics(["small"], log=log, now=clock)
    watched = answered(metrics, clock)
    watched.end(200)
    (line,) = lines(log, tmp_path / "requests.jsonl")
    assert line.pop("time").endswith("Z")
    assert line == {
        "request": watched.id, "answer": "cmpl-a", "endpoint": "", "model": "small", "tenant": "acme", "tier": "gold",
        "code": 200, "error": None, "finish_reasons": {"stop": 1}, "num_choices": 1, "num_prompt_tokens": 10,
        "num_cached_tokens": 4, "num_tokens": 5, "queue_s": 0.05, "first_token_s": 0.2, "duration_s": 0.6,
    }  # fmt: skip
    assert (tmp_path / "requests.jsonl").stat().st_mode & 0o077 == 0


def test_no_answer_gets_into_the_log_and_nothing_breaks_its_lines(
    tmp_path: Path, log: RequestLog, clock: Clock
) -> None:
    metrics = Metrics(["small"], log=log, now=clock)
    watched = metrics.begin("eve\n{}\x1b[2J\u2028" + "x" * 1000, "gold")
    watched.model = "no such model\n"
    event = Event("cmpl-b-0", (7,), "SECRET", num_tokens=1, finish_reason="error", error="internal", detail="SECRET")
    watched.event(replace(event, prompt_logprobs=()))
    watched.end(500)
    (line,) = lines(log, tmp_path / "requests.jsonl")
    raw = (tmp_path / "requests.jsonl").read_bytes()
    assert line["error"] == "internal" and line["model"] == "other" and len(line["tenant"]) == 128
    assert b"SECRET" not in raw and all(32 <= byte < 127 or byte == 10 for byte in raw) and raw.count(b"\n") == 1


def test_a_file_of_the_log_is_turned_over_when_it_is_full(tmp_path: Path) -> None:
    log = RequestLog.to_file(tmp_path / "requests.jsonl", max_bytes=1000)
    for number in range(100):
        log.write({"number": number})
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["requests.jsonl", *(f"requests.jsonl.{i}" for i in (1, 2, 3))]
    assert all(file.stat().st_size <= 1000 for file in files)
    assert json.loads((tmp_path / "requests.jsonl").read_text().splitlines()[-1])["number"] == 99


class Stuck(RequestLog):
    """A log whose thread never runs: what takes the lines has stopped."""

    def _run(self) -> None:
        return


def test_a_log_that_nobody_takes_holds_up_nothing_and_says_what_it_lost(tmp_path: Path, clock: Clock) -> None:
    log = Stuck.to_file(tmp_path / "requests.jsonl")
    metrics = Metrics(["small"], log=log, now=clock)
    for _ in range(MAX_WAITING_LINES + 7):
        metrics.begin("acme", "gold").end(200)
    assert samples(metrics)["jaxml_log_lines_dropped_total",] == 7


def test_lines_hold_whatever_a_name_is() -> None:
    assert json.loads(line_of({"tenant": "\ud800\x00é"}))["tenant"] == "\ud800\x00é"
