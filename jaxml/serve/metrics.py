"""What is counted and timed of a service: a `Watched` for each request, the engines' stats, and a summary of lately.

Reads `serve.measures`, `serve.exposition`, `serve.request_log` and `infer.request`; `serve.gate` makes the `Watched`, the
endpoints tell it what happens, `/metrics` sends `render` to Prometheus and `/stats` sends `summary` to the page. No jax.

Every clock is the monotonic one of the API process, so no interval spans two processes: a request begins when the guard
sees it and ends when its answer was sent; only the time in the queue comes from the engine, as an interval.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from jaxml.infer.request import ErrorKind, Event
from jaxml.serve.exposition import BUCKETS, ENGINE_COUNTERS, render
from jaxml.serve.measures import Cost, Histogram, Names, RecentCounts, Share, Totals, Window, lanes_of, quantile
from jaxml.serve.request_log import RequestLog

MAX_TENANTS, MAX_TIERS = 64, 16
# The page shows rates over the last minute, and quantiles, codes and errors over the last five.
RATE_S, LATENCY_S = 60, 300
CODES = {str(code) for code in (200, 400, 401, 403, 404, 405, 408, 413, 422, 429, 499, 500, 503, 504)}

Stats = Mapping[str, Mapping[str, float]]


class Metrics:
    """Counts the requests of one API process.

    models: the names that are served; no other becomes a label. price_per_hour: of one device, in any currency (0: costs are
    not shown). num_devices: how many the service holds. log: gets a line for each request that ended. now: a monotonic
    clock, seconds.
    """

    def __init__(
        self,
        models: Iterable[str],
        price_per_hour: float = 0.0,
        *,
        num_devices: int = 1,
        log: RequestLog | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        self.now, self.log = now, log
        self._models = tuple(dict.fromkeys(models))
        self.model_names, self.tenant_names, self.tier_names = (
            Names(self._models),
            Names(most=MAX_TENANTS),
            Names(most=MAX_TIERS),
        )
        self.code_names, self.error_names = Names(CODES), Names(get_args(ErrorKind))
        self.totals = Totals({name: Histogram(bounds) for name, bounds in BUCKETS.items()})
        self.cost = Cost(price_per_hour, num_devices) if price_per_hour > 0 else None
        self._started = now()
        self._windows = {name: Window(LATENCY_S, now) for name in BUCKETS}
        self.rates = RecentCounts(RATE_S, now)
        self.outcomes = RecentCounts(LATENCY_S, now)
        self._busy = Share(RATE_S, now)

    def begin(self, tenant: str, tier: str) -> Watched:
        """A request was let in, or refused at the door. tenant, tier: "" where it is not known whose it is."""
        self.totals.open += 1
        return Watched(self, self.now(), tenant, tier)

    def observe(self, name: str, labels: tuple[str, str], seconds: float) -> None:
        """Put an interval into its histogram and among the latest."""
        self.totals.histograms[name].observe(labels, seconds)
        self._windows[name].add(seconds)

    def render(self, stats: Stats) -> bytes:
        """All of it in Prometheus' text format. stats: what each engine says, by model; one that is missing is down."""
        self._follow(stats)
        num_dropped = self.log.num_dropped if self.log is not None else None
        return render(self.totals, self._current(stats), self._wall_s(), self.cost, num_dropped)

    def summary(self, stats: Stats) -> dict[str, Any]:
        """What the page shows, as JSON can hold it: the last minutes, and what each engine says now. No tenant is named."""
        self._follow(stats)
        shares = self._busy.follow({model: self.totals.engine(model, "busy_s") or 0.0 for model in self._models})
        rates, outcomes = self.rates.totals(), self.outcomes.totals()
        passed_s = max(1.0, min(RATE_S, self._wall_s()))
        return {
            "rate_window_s": RATE_S,
            "latency_window_s": LATENCY_S,
            "uptime_s": self._wall_s(),
            "open_requests": self.totals.open,
            "models": {model: self._engine_now(model, stats.get(model), shares[model]) for model in self._models},
            "latency": {name: _quantiles(window.values()) for name, window in self._windows.items()},
            "requests_per_s": rates["answered"] / passed_s,
            "tokens_per_s": {kind: rates[kind] / passed_s for kind in ("prompt", "generated")},
            "codes": _named(outcomes, "code "),
            "errors": _named(outcomes, "error "),
            "cost": self._cost_lately(rates, passed_s),
        }

    def _follow(self, stats: Stats) -> None:
        for model, numbers in self._current(stats).items():
            self.totals.follow(model, numbers, ENGINE_COUNTERS)

    def _current(self, stats: Stats) -> dict[str, Mapping[str, float]]:
        """What is said of the models that are served; an empty mapping of one that is down."""
        return {model: stats.get(model, {}) for model in self._models}

    def _engine_now(self, model: str, stats: Mapping[str, float] | None, busy_share: float) -> dict[str, Any]:
        stats = stats or {}
        prompt, cached = self.totals.engine(model, "num_prompt_tokens"), self.totals.engine(model, "num_cached_tokens")
        pages = {name: stats[f"pages_{name}"] for name in ("total", "used", "cached") if f"pages_{name}" in stats}
        return {
            "is_up": bool(stats),
            "running": stats.get("running", 0),
            "free_places": stats.get("free_places", 0),
            "waiting": dict(lanes_of(stats)),
            "pages": pages,
            "busy_share": busy_share,
            "cached_share": cached / prompt if prompt and cached is not None else None,
            "compiles": self.totals.engine(model, "compiles"),
            "preempted": self.totals.engine(model, "preempted"),
        }

    def _cost_lately(self, rates: Counter[str], passed_s: float) -> dict[str, float | None] | None:
        if self.cost is None:
            return None
        return {
            "per_hour": self.cost.spent(3600.0),
            "per_thousand_requests": self.cost.each(passed_s, rates["answered"], 1e3),
            "per_million_generated_tokens": self.cost.each(passed_s, rates["generated"], 1e6),
        }

    def _wall_s(self) -> float:
        return self.now() - self._started


@dataclass
class _Choice:
    """One answer of a request: tokens so far, when its first and its latest came."""

    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    finish_reason: str | None = None


class Watched:
    """One request, from the guard to the end of its answer. Nothing that it said or was told is kept.

    model: whose it is, once known. endpoint: the path, if it is one that is served. id: names it in the log.
    """

    def __init__(self, metrics: Metrics, began: float, tenant: str, tier: str):
        self.id = uuid.uuid4().hex
        self.model = self.endpoint = ""
        self.tenant, self.tier = tenant, tier
        self._metrics, self._began = metrics, began
        self._choices: dict[str, _Choice] = {}
        self._num_choices = self._num_prompt = self._num_cached = self._num_tokens = 0
        self._first_s: float | None = None
        self._queue_s: float | None = None
        self._error: str | None = None
        self._has_ended = False

    def asked(self, num_prompt_tokens: int, num_choices: int) -> None:
        """The request could be read. num_prompt_tokens: each prompt counted once, however many choices it has."""
        self._num_prompt, self._num_choices = num_prompt_tokens, num_choices
        self._count_tokens("prompt", num_prompt_tokens)

    def event(self, event: Event) -> None:
        """The engine said something about one of its choices."""
        if self._has_ended:
            return
        now_s = self._metrics.now() - self._began
        choice = self._choices.get(event.id)
        if choice is None:
            choice = self._choices[event.id] = _Choice()
        if event.queue_s is not None:
            self._observe("queue", event.queue_s)
            self._queue_s = max(event.queue_s, self._queue_s or 0.0)
        if event.num_cached:
            self._num_cached += event.num_cached
            self._count_tokens("cached", event.num_cached)
        if event.num_tokens > choice.num_tokens:
            self._generated(choice, event.num_tokens, now_s)
        if event.finish_reason is not None:
            self._finished(choice, event)

    def end(self, code: int) -> None:
        """The answer was sent, or will not be: `code` is its HTTP status (499: the client left). Once; more calls do nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        metrics, duration_s = self._metrics, self._metrics.now() - self._began
        metrics.totals.open -= 1
        model, tenant, tier = self._labels()
        known_code = metrics.code_names(str(code))
        metrics.totals.requests[model, tenant, tier, known_code] += 1
        metrics.outcomes.add(f"code {known_code}")
        if self._choices:
            self._observe("request_duration", duration_s)
        if self._choices and code < 400:
            metrics.rates.add("answered")
        if metrics.log is not None:
            metrics.log.write(self._line(code, duration_s))

    def _generated(self, choice: _Choice, num_tokens: int, now_s: float) -> None:
        new = num_tokens - choice.num_tokens
        self._num_tokens += new
        self._count_tokens("generated", new)
        if not choice.num_tokens:
            choice.first_s = now_s
        choice.num_tokens, choice.last_s = num_tokens, now_s
        if self._first_s is None:
            self._first_s = now_s
            self._observe("time_to_first_token", now_s)

    def _finished(self, choice: _Choice, event: Event) -> None:
        choice.finish_reason = event.finish_reason
        if event.finish_reason == "error":
            metrics = self._metrics
            kind = metrics.error_names(event.error or "internal")
            self._error = kind
            metrics.totals.errors[metrics.model_names(self.model), kind] += 1
            metrics.outcomes.add(f"error {kind}")
        elif choice.num_tokens > 1:
            self._observe("time_per_output_token", (choice.last_s - choice.first_s) / (choice.num_tokens - 1))

    def _observe(self, name: str, seconds: float) -> None:
        model, _, tier = self._labels()
        self._metrics.observe(name, (model, tier), seconds)

    def _count_tokens(self, kind: str, number: int) -> None:
        model, tenant, tier = self._labels()
        self._metrics.totals.tokens[model, tenant, tier, kind] += number
        self._metrics.rates.add(kind, number)

    def _labels(self) -> tuple[str, str, str]:
        metrics = self._metrics
        return metrics.model_names(self.model), metrics.tenant_names(self.tenant), metrics.tier_names(self.tier)

    def _line(self, code: int, duration_s: float) -> dict[str, Any]:
        """What the log says: ids, counts and durations, never what was asked or answered."""
        first = next(iter(self._choices), "")
        return {
            "request": self.id,
            "answer": first.rpartition("-")[0],
            "endpoint": self.endpoint,
            "model": self._metrics.model_names(self.model),
            "tenant": self.tenant,
            "tier": self.tier,
            "code": code,
            "error": self._error,
            "finish_reasons": dict(Counter(choice.finish_reason or "none" for choice in self._choices.values())),
            "num_choices": self._num_choices,
            "num_prompt_tokens": self._num_prompt,
            "num_cached_tokens": self._num_cached,
            "num_tokens": self._num_tokens,
            "queue_s": self._queue_s,
            "first_token_s": self._first_s,
            "duration_s": duration_s,
        }


def _quantiles(values: list[float]) -> dict[str, float | None]:
    return {"count": len(values), "p50": quantile(values, 0.5), "p95": quantile(values, 0.95)}


def _named(counts: Counter[str], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in sorted(counts.items()) if name.startswith(prefix)}
