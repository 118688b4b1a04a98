"""The metrics in Prometheus' text format: their names, what they mean, and their buckets.

Reads `serve.measures`; `serve.metrics` calls `render`. Through `prometheus_client`, with a registry of our own at each
scrape: no global state, and no files of its multi-process mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxml.serve.measures import Cost, Totals, lanes_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Bounds of the buckets, seconds.
BUCKETS: dict[str, tuple[float, ...]] = {
    "time_to_first_token": (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    "time_per_output_token": (
        0.0005,
        0.001,
        0.0025,
        0.005,
        0.01,
        0.02,
        0.03,
        0.05,
        0.075,
        0.1,
        0.15,
        0.25,
        0.5,
        1.0,
        2.5,
    ),
    "request_duration": (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0),
    "queue": (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
}
TIMED = {
    "time_to_first_token": "From when a request came in to the first token of its first choice.",
    "time_per_output_token": "From a choice's first token to its last, over the tokens after the first; choices of 2 or more.",
    "request_duration": "From when a request came in to when its answer was sent. Only of those that an engine took up.",
    "queue": "What a choice waited in the engine's queue before its prompt was begun.",
}


@dataclass(frozen=True)
class Counted:
    """One counter of the engine's stats: the metric that it becomes, and its label besides the model."""

    metric: str
    label: tuple[str, str] | None = None


ENGINE_COUNTERS: dict[str, Counted] = {
    "accepted": Counted("jaxml_engine_accepted"),
    "finished": Counted("jaxml_engine_ended", ("outcome", "finished")),
    "failed": Counted("jaxml_engine_ended", ("outcome", "failed")),
    "cancelled": Counted("jaxml_engine_ended", ("outcome", "cancelled")),
    "preempted": Counted("jaxml_engine_preempted"),
    "num_prompt_tokens": Counted("jaxml_engine_tokens", ("kind", "prompt")),
    "num_cached_tokens": Counted("jaxml_engine_tokens", ("kind", "cached")),
    "num_tokens": Counted("jaxml_engine_tokens", ("kind", "generated")),
    "num_steps": Counted("jaxml_engine_steps"),
    "busy_s": Counted("jaxml_engine_busy_seconds"),
    "compiles": Counted("jaxml_engine_compiles"),
}
ENGINE_HELP = {
    "jaxml_engine_accepted": "Choices that the engine took into its queue.",
    "jaxml_engine_ended": "Choices that ended, by outcome.",
    "jaxml_engine_preempted": "Times that a running choice had to make room and was continued later.",
    "jaxml_engine_tokens": "Tokens by kind: of prompts, those of them whose keys and values were in the cache, generated.",
    "jaxml_engine_steps": "Steps of the engine.",
    "jaxml_engine_busy_seconds": "Time inside steps; its rate is the busy share. Beside it: jaxml_wall_seconds_total.",
    "jaxml_engine_compiles": "Programs compiled after warm-up; each one held up every request, and there should be none.",
}


def render(
    totals: Totals,
    engines: Mapping[str, Mapping[str, float]],
    wall_s: float,
    cost: Cost | None,
    num_dropped: int | None,
) -> bytes:
    """Everything as text. engines: what each model's engine says now, nothing where it is down. num_dropped: lines of the
    request log that were lost; None without a log."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(totals, engines, wall_s, cost, num_dropped))
    return generate_latest(registry)


@dataclass(frozen=True, eq=False)
class _Families(Collector):
    totals: Totals
    engines: Mapping[str, Mapping[str, float]]
    wall_s: float
    cost: Cost | None
    num_dropped: int | None

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._histograms()
        yield from self._engine_gauges()
        yield from self._engine_counters()
        yield CounterMetricFamily("jaxml_wall_seconds", "Time since the service began to count.", value=self.wall_s)
        if self.num_dropped is not None:
            text = "Lines of the request log that were lost because what takes them was too slow."
            yield CounterMetricFamily("jaxml_log_lines_dropped", text, value=self.num_dropped)
        if self.cost is not None:
            yield from self._costs(self.cost)

    def _requests(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "jaxml_requests",
            "HTTP requests that ended, by code (499: the client left; a stream that failed after it began is a 200, "
            "and counted in jaxml_errors_total).",
            labels=["model", "tenant", "tier", "code"],
        )
        tokens = CounterMetricFamily(
            "jaxml_tokens",
            "Tokens of requests, by kind: prompt (each prompt once), cached (not computed again; each choice counts), generated.",
            labels=["model", "tenant", "tier", "kind"],
        )
        errors = CounterMetricFamily(
            "jaxml_errors", "Choices that ended with an error, by kind.", labels=["model", "kind"]
        )
        for family, counts in (
            (requests, self.totals.requests),
            (tokens, self.totals.tokens),
            (errors, self.totals.errors),
        ):
            for labels, count in sorted(counts.items()):
                family.add_metric(labels, count)
            yield family
        yield GaugeMetricFamily("jaxml_requests_open", "HTTP requests that are being answered.", value=self.totals.open)

    def _histograms(self) -> Iterator[Metric]:
        for name, histogram in self.totals.histograms.items():
            family = HistogramMetricFamily(f"jaxml_{name}_seconds", TIMED[name], labels=["model", "tier"])
            bounds = [floatToGoString(bound) for bound in (*histogram.bounds, math.inf)]
            for labels, cell in sorted(histogram.cells.items()):
                family.add_metric(labels, list(zip(bounds, cell.cumulative(), strict=True)), cell.total)
            yield family

    def _engine_gauges(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("jaxml_engine_up", "1 while the engine answers.", labels=["model"])
        running = GaugeMetricFamily("jaxml_engine_running", "Choices that have a place.", labels=["model"])
        free = GaugeMetricFamily("jaxml_engine_free_places", "Places that no choice has.", labels=["model"])
        waiting = GaugeMetricFamily("jaxml_engine_waiting", "Choices in the queue, by lane.", labels=["model", "lane"])
        capacity = GaugeMetricFamily("jaxml_engine_pages_capacity", "Pages of the KV cache.", labels=["model"])
        pages = GaugeMetricFamily(
            "jaxml_engine_pages",
            "Pages of the KV cache by use: used (by choices), cached (prefixes).",
            labels=["model", "use"],
        )
        for model, stats in self.engines.items():
            up.add_metric([model], bool(stats))
            for family, name in ((running, "running"), (free, "free_places"), (capacity, "pages_total")):
                if name in stats:
                    family.add_metric([model], stats[name])
            for lane, count in lanes_of(stats):
                waiting.add_metric([model, lane], count)
            for use in ("used", "cached"):
                if f"pages_{use}" in stats:
                    pages.add_metric([model, use], stats[f"pages_{use}"])
        yield from (up, running, free, waiting, capacity, pages)

    def _engine_counters(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for name, counted in ENGINE_COUNTERS.items():
            if counted.metric not in families:
                labels = ["model", *([counted.label[0]] if counted.label else [])]
                families[counted.metric] = CounterMetricFamily(
                    counted.metric, ENGINE_HELP[counted.metric], labels=labels
                )
            for model in self.totals.engines:
                if (value := self.totals.engine(model, name)) is not None:
                    labels = [model, *([counted.label[1]] if counted.label else [])]
                    families[counted.metric].add_metric(labels, value)
        yield from families.values()

    def _costs(self, cost: Cost) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "jaxml_cost",
            "Price of a device-hour times devices times hours since the start, busy or not, in the currency of the price.",
            value=cost.spent(self.wall_s),
        )
        answered = sum(
            count
            for (model, _, _, code), count in self.totals.requests.items()
            if model in self.engines and code == "200"
        )
        generated = sum(count for labels, count in self.totals.tokens.items() if labels[-1] == "generated")
        for name, text, done, scale in (
            (
                "jaxml_cost_per_thousand_requests",
                "jaxml_cost_total over requests answered with 200, times 1,000.",
                answered,
                1e3,
            ),
            (
                "jaxml_cost_per_million_tokens",
                "jaxml_cost_total over generated tokens, times 1,000,000.",
                generated,
                1e6,
            ),
        ):
            each = cost.each(self.wall_s, done, scale)
            if each is not None:
                yield GaugeMetricFamily(
                    name, f"{text} Since the start; alerts.yml has it for the last hour.", value=each
                )
