"""Numbers that add up while a service runs: bounded label values, histograms, counters that outlive a worker, windows.

Reads no other jaxml file; `serve.metrics` counts with these and `serve.exposition` writes the `Totals`. No locks: the event
loop of the API process owns them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

Labels = tuple[str, ...]

NOBODY, OTHER = "none", "other"
MAX_WINDOW_VALUES = 4096


class Names:
    """The values that one label may take: those known from the start, and the first that come, `most` in all.

    Whatever else comes is "other", and "" is "none", so that no client can make the number of time series grow.
    """

    def __init__(self, known: Iterable[str] = (), most: int = 0):
        self._known = set(known)
        self._most = most

    def __call__(self, name: str) -> str:
        if not name:
            return NOBODY
        if name not in self._known and len(self._known) < self._most:
            self._known.add(name)
        return name if name in self._known else OTHER


@dataclass
class Cell:
    """A histogram of one set of labels: values that fell into each bucket (the last has no bound), and their sum."""

    counts: list[int]
    total: float = 0.0

    def cumulative(self) -> list[int]:
        """Values at most as large as each bound; the last is the count of all."""
        sums, so_far = [], 0
        for count in self.counts:
            so_far += count
            sums.append(so_far)
        return sums


class Histogram:
    """Values by bucket. `bounds` ascend; a value equal to a bound lies under it, as Prometheus has it."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.cells: dict[Labels, Cell] = {}

    def observe(self, labels: Labels, value: float) -> None:
        if labels not in self.cells:
            self.cells[labels] = Cell([0] * (len(self.bounds) + 1))
        cell = self.cells[labels]
        cell.counts[bisect_left(self.bounds, value)] += 1
        cell.total += value


class Rising:
    """A counter that is read from a process which may be replaced: its numbers then begin at 0 again, this one goes on.

    What the old process counted after it was read for the last time is lost.

    >>> counter = Rising()
    >>> [counter.follow(value) for value in (3, 5, 1, 2)]
    [3, 5, 6, 7]
    """

    def __init__(self) -> None:
        self._before: float = 0
        self._last: float = 0

    def follow(self, value: float) -> float:
        """The whole count, now that the process says `value`."""
        if value < self._last:
            self._before += self._last
        self._last = value
        return self.value

    @property
    def value(self) -> float:
        return self._before + self._last


@dataclass
class Totals:
    """All that was counted since the start, by labels.

    requests: (model, tenant, tier, code). tokens: (model, tenant, tier, kind). errors: (model, kind). histograms: by the name
    of what they time, (model, tier) each. open: requests that are being answered. engines: an engine's own counters.
    """

    histograms: dict[str, Histogram]
    requests: Counter[Labels] = field(default_factory=Counter)
    tokens: Counter[Labels] = field(default_factory=Counter)
    errors: Counter[Labels] = field(default_factory=Counter)
    open: int = 0
    engines: dict[str, dict[str, Rising]] = field(default_factory=dict)

    def follow(self, model: str, stats: Mapping[str, float], names: Iterable[str]) -> None:
        """Take in what an engine says of itself now, of the counters `names`."""
        counters = self.engines.setdefault(model, {})
        for name in names:
            if name in stats:
                counters.setdefault(name, Rising()).follow(stats[name])

    def engine(self, model: str, name: str) -> float | None:
        """An engine's counter; None when it never said it."""
        counter = self.engines.get(model, {}).get(name)
        return None if counter is None else counter.value


@dataclass(frozen=True)
class Cost:
    """What the devices cost, busy or not, in the currency of the price.

    price_per_hour: of one device. A cost per request or token is all that was spent in a time, divided by what was done in
    it; None while nothing was.
    """

    price_per_hour: float
    num_devices: int = 1

    def spent(self, wall_s: float) -> float:
        return self.price_per_hour * self.num_devices * wall_s / 3600.0

    def each(self, wall_s: float, done: float, scale: float) -> float | None:
        """The cost of `scale` of what was done `done` times in this time."""
        return scale * self.spent(wall_s) / done if done else None


class Window:
    """The values of the last `span_s` seconds, at most `most` of them (the latest)."""

    def __init__(self, span_s: float, now: Callable[[], float], most: int = MAX_WINDOW_VALUES):
        self._span_s, self._now = span_s, now
        self._values: deque[tuple[float, float]] = deque(maxlen=most)

    def add(self, value: float) -> None:
        self._values.append((self._now(), value))

    def values(self) -> list[float]:
        since = self._now() - self._span_s
        while self._values and self._values[0][0] < since:
            self._values.popleft()
        return [value for _, value in self._values]


class RecentCounts:
    """What was counted in the last `span_s` seconds, by name, in slices of one second. Names are bounded by the caller."""

    def __init__(self, span_s: int, now: Callable[[], float]):
        self._span_s, self._now = span_s, now
        self._slices: deque[tuple[int, Counter[str]]] = deque(maxlen=span_s + 1)

    def add(self, name: str, amount: int = 1) -> None:
        second = int(self._now())
        if not self._slices or self._slices[-1][0] != second:
            self._slices.append((second, Counter()))
        self._slices[-1][1][name] += amount

    def totals(self) -> Counter[str]:
        since = int(self._now()) - self._span_s
        total: Counter[str] = Counter()
        for second, counts in self._slices:
            if second >= since:
                total.update(counts)
        return total


class Share:
    """How fast counters of seconds grew lately, as a share of the time: of the last `span_s` seconds, read now and then."""

    def __init__(self, span_s: float, now: Callable[[], float]):
        self._span_s, self._now = span_s, now
        self._readings: deque[tuple[float, Mapping[str, float]]] = deque([(now(), {})])

    def follow(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """The shares by name, now that the counters say `seconds`. Counters of which nothing was heard before began at 0."""
        now = self._now()
        # One that is older than the span stays, to measure from.
        while len(self._readings) > 1 and self._readings[1][0] <= now - self._span_s:
            self._readings.popleft()
        since, before = self._readings[0]
        # Many may ask at once; a reading a second is enough.
        if now >= self._readings[-1][0] + 1:
            self._readings.append((now, dict(seconds)))
        passed = max(now - since, 1e-9)
        return {name: min(1.0, (value - before.get(name, 0.0)) / passed) for name, value in seconds.items()}


def quantile(values: list[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed; None of nothing.

    >>> quantile([3.0, 1.0, 2.0, 4.0], 0.5), quantile([3.0, 1.0, 2.0, 4.0], 0.95), quantile([], 0.5)
    (2.0, 4.0, None)
    """
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def lanes_of(stats: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """(lane, requests that wait in it) of an engine's stats; the lane "all" where it has none."""
    found = {name.removeprefix("queued_"): value for name, value in stats.items() if name.startswith("queued_")}
    yield from found.items() if found else [("all", stats["queued"])] if "queued" in stats else []
