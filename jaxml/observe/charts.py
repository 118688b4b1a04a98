"""Line charts as inline SVG text: axes with ticks and names, a legend, gaps where a value is missing.

Reads no other jaxml file; `observe.report` puts the charts on its page, whose style sheet gives the classes used here
their colours. A chart stays small for any number of steps: `downsample` keeps the extremes of each bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

Point = tuple[float, float | None]

BUCKETS = 250
DOTS_UP_TO = 40  # points of a curve, each of which is then drawn as a dot
WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 20, 26, 42  # margins around the plotting area, which hold ticks and names
LOG_SCALE_ABOVE = 100.0  # the ratio of the largest to the smallest value from which on the axis is logarithmic
TINY = 1e-200  # values below it are drawn as 0


@dataclass(frozen=True)
class Series:
    """One curve. `points` are (x, y) with rising x; a y of None is a gap. `style` is a class of the page: a or b."""

    name: str
    points: Sequence[Point]
    style: str = "a"


def line_chart(
    title: str, y_name: str, series: Sequence[Series], x_name: str = "step", is_from_zero: bool = False
) -> str:
    """An `<svg>` element, or a sentence in its place when no series has a point.

    `y_name` should name the unit. `is_from_zero` starts the y axis at 0, so that heights can be compared. Otherwise it
    is logarithmic, and says so, when all values are positive and the largest is over `LOG_SCALE_ABOVE` times the
    smallest. Few points are drawn as dots too.
    """
    series = [Series(s.name, downsample(s.points, BUCKETS), s.style) for s in series]
    drawn = [s for s in series if any(y is not None for _, y in s.points)]
    if not drawn:
        return f'<p class="none">{escape(title)}: nothing was recorded.</p>'
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points if y is not None] + [0.0] * is_from_zero
    is_log = min(ys) > 0 and max(ys) / min(ys) > LOG_SCALE_ABOVE
    x_axis = Axis.over(min(xs), max(xs), LEFT, WIDTH - RIGHT, is_tight=True, is_whole=True)
    y_axis = Axis.over(min(ys), max(ys), HEIGHT - BOTTOM, TOP, is_log=is_log)
    y_name += ", log scale" if is_log else ""
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        *_grid(x_axis, y_axis, x_name, y_name),
        *(_curve(s, x_axis, y_axis) for s in drawn),
        *_legend(drawn),
        "</svg>",
    ]
    return "\n".join(parts)


def downsample(points: Sequence[Point], buckets: int) -> list[Point]:
    """The lowest and the highest point of each of `buckets` equal spans of x, one gap of each span that has any, and
    the first and the last point; at most `2 * buckets` points are returned unchanged. x must rise.

    >>> downsample([(0.0, 5.0), (1.0, 9.0), (2.0, 3.0), (3.0, 4.0), (4.0, 4.5), (5.0, 2.0), (6.0, 3.0)], 2)
    [(0.0, 5.0), (1.0, 9.0), (2.0, 3.0), (4.0, 4.5), (5.0, 2.0), (6.0, 3.0)]
    """
    if len(points) <= 2 * buckets:
        return list(points)
    first, last = points[0], points[-1]
    width = (last[0] - first[0]) / buckets
    kept = {first, last}
    for _, inside in groupby(points, key=lambda point: min(int((point[0] - first[0]) / width), buckets - 1)):
        by_height = sorted(inside, key=lambda point: (point[1] is not None, point[1] or 0.0))  # gaps come first
        values = [point for point in by_height if point[1] is not None]
        kept.update(by_height[:1], values[:1], values[-1:])
    return sorted(kept, key=lambda point: point[0])


@dataclass(frozen=True)
class Axis:
    """A range of values, where it lies in the picture, and the ticks on it."""

    low: float
    high: float
    start: int
    end: int
    ticks: tuple[float, ...]
    is_log: bool = False

    @classmethod
    def over(
        cls,
        low: float,
        high: float,
        start: int,
        end: int,
        is_log: bool = False,
        is_tight: bool = False,
        is_whole: bool = False,
    ) -> Axis:
        """An axis that holds low..high: tight around it, or widened to the next ticks."""
        if is_log:
            first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
            stride = max(1, math.ceil((last - first) / 5))
            ticks = tuple(10.0**power for power in range(first, last + 1, stride))
            return cls(min(low, ticks[0]), max(high, ticks[-1]), start, end, ticks, is_log=True)
        size = max(abs(low), abs(high))
        if high - low <= 1e-6 * size or size < TINY:  # one value: give it room
            room = 1.0 if is_tight or size < TINY else size / 10
            low, high = low - room, high + room
        ticks = nice_ticks(low, high, least=1.0 if is_whole else 0.0)
        if is_tight:
            return cls(low, high, start, end, tuple(t for t in ticks if low <= t <= high))
        return cls(ticks[0], ticks[-1], start, end, ticks)

    def place(self, value: float) -> float:
        """The coordinate of a value in the picture."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def nice_ticks(low: float, high: float, least: float = 0.0, count: int = 5) -> tuple[float, ...]:
    """About `count` multiples of 1, 2 or 5 times a power of ten that enclose low..high, at least `least` apart.

    >>> nice_ticks(1.7, 4.3)
    (1.0, 2.0, 3.0, 4.0, 5.0)
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    stride = max(least, next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999))
    first, last = math.floor(low / stride + 1e-9), math.ceil(high / stride - 1e-9)
    return tuple(float(f"{i * stride:.12g}") for i in range(first, last + 1))


def tick_text(value: float) -> str:
    """Short text of a tick: `0.002`, `1.5k`, `2M`, `1e-6`.

    >>> [tick_text(v) for v in (0.0, 0.002, 1500.0, 2e6, 1e-6)]
    ['0', '0.002', '1.5k', '2M', '1e-06']
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if limit <= abs(value) < limit * 1000:
            return f"{value / limit:.7g}{unit}"
    return f"{value:.7g}"


def _grid(x_axis: Axis, y_axis: Axis, x_name: str, y_name: str) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    lines = []
    for tick in y_axis.ticks:
        y = y_axis.place(tick)
        lines.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_text(tick)}</text>')
    for tick in x_axis.ticks:
        x = x_axis.place(tick)
        lines.append(f'<path class="grid" d="M{x:.1f} {bottom}v4"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{tick_text(tick)}</text>')
    lines.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    lines.append(f'<text class="name" x="2" y="12">{escape(y_name)}</text>')
    middle = (LEFT + right) / 2
    lines.append(f'<text class="name" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>')
    return lines


def _curve(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    path, dots, is_down = [], [], False
    for x, y in series.points:
        if y is None:
            is_down = False
            continue
        where = f"{x_axis.place(x):.1f} {y_axis.place(y):.1f}"
        path.append(f"{'L' if is_down else 'M'}{where}" + ("" if is_down else "h0"))  # h0: a lone point is a dot
        is_down = True
        if len(series.points) <= DOTS_UP_TO:
            cx, cy = where.split()
            dots.append(f'<circle class="dot {series.style}" cx="{cx}" cy="{cy}" r="2.5"/>')
    return f'<path class="curve {series.style}" d="{"".join(path)}"/>' + "".join(dots)


def _legend(series: Sequence[Series]) -> list[str]:
    """Names of the curves at the top right; a single curve is named by its axis."""
    if len(series) < 2:
        return []
    parts, right = [], WIDTH - RIGHT
    for s in reversed(series):
        parts.append(f'<text x="{right}" y="12" text-anchor="end">{escape(s.name)}</text>')
        right -= 7 * len(s.name) + 6
        parts.append(f'<path class="curve {s.style}" d="M{right - 16} 8h14"/>')
        right -= 28
    return parts
