"""Charts keep extremes and gaps, stay small, put every point inside the axes, and tick at round numbers."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxml.observe import charts
from jaxml.observe.charts import Axis, Series, downsample, line_chart, nice_ticks, tick_text

numbers = st.floats(-1e30, 1e30)
curves = st.lists(st.none() | numbers, min_size=1, max_size=200).map(
    lambda ys: [(float(x), y) for x, y in enumerate(ys, start=1)]
)
SVG = "{http://www.w3.org/2000/svg}"


def parse(svg):
    return ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" '))


def drawn_points(svg, style="a"):
    path = parse(svg).find(f"{SVG}path[@class='curve {style}']").get("d")
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


@given(curves, st.integers(1, 20))
def test_downsampling_keeps_order_extremes_ends_and_the_size_limit(points, buckets):
    kept = downsample(points, buckets)
    values = [y for _, y in points if y is not None]
    assert kept == sorted(set(kept), key=lambda p: p[0])
    assert set(kept) <= set(points)
    assert len(kept) <= 3 * buckets + 2
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    if values:
        left = [y for _, y in kept if y is not None]
        assert (min(left), max(left)) == (min(values), max(values))
    assert any(y is None for _, y in kept) == any(y is None for _, y in points)
    if len(points) <= 2 * buckets:
        assert kept == points


def test_a_spike_of_one_step_in_a_hundred_thousand_is_drawn():
    points = [(float(x), 90.0 if x == 77_777 else 1.0) for x in range(100_000)]
    svg = line_chart("Loss", "nats", [Series("train", points)])
    top = min(y for _, y in drawn_points(svg))
    assert top < charts.TOP + 0.2 * (charts.HEIGHT - charts.BOTTOM - charts.TOP)
    assert len(svg) < 20_000


@given(curves, st.booleans())
def test_every_point_lies_inside_the_axes_and_the_text_is_well_formed(points, is_from_zero):
    svg = line_chart("Loss", "nats", [Series("train", points)], is_from_zero=is_from_zero)
    if all(y is None for _, y in points):
        assert svg == '<p class="none">Loss: nothing was recorded.</p>'
        return
    for x, y in drawn_points(svg):
        assert charts.LEFT <= x <= charts.WIDTH - charts.RIGHT
        assert charts.TOP <= y <= charts.HEIGHT - charts.BOTTOM


@given(st.lists(st.floats(2.0**-140, 2.0**120), min_size=2))
def test_positive_values_of_any_range_lie_inside_the_axes(values):
    svg = line_chart("Norm", "norm", [Series("norm", [(float(x), y) for x, y in enumerate(values)])])
    assert all(charts.TOP <= y <= charts.HEIGHT - charts.BOTTOM for _, y in drawn_points(svg))
    assert ("log scale" in svg) == (max(values) / min(values) > charts.LOG_SCALE_ABOVE)


@example(0.0, 5e-324)
@given(numbers, numbers)
def test_ticks_are_few_rising_and_enclose_the_range(a, b):
    low, high = min(a, b), max(a, b)
    axis = Axis.over(low, high, 0, 100)
    slack = 1e-8 * (high - low)
    assert axis.low <= low + slack
    assert high - slack <= axis.high
    assert list(axis.ticks) == sorted(set(axis.ticks))
    assert 2 <= len(axis.ticks) <= 8
    assert len({tick_text(tick) for tick in axis.ticks}) == len(axis.ticks)


@pytest.mark.parametrize("steps", [[1], [1, 2], [1, 2, 3], [1, 1000], [5000, 6000], [1, 100_000]])
def test_ticks_on_the_step_axis_are_whole_steps(steps):
    points = [(float(step), 1.0) for step in steps]
    texts = [e.text for e in parse(line_chart("Loss", "nats", [Series("train", points)])).iter(f"{SVG}text")]
    bottom = [e.text for e in parse(line_chart("Loss", "nats", [Series("t", points)])).iter(f"{SVG}text")][:-2]
    assert texts[-2:] == ["nats", "step"]
    axis = Axis.over(float(steps[0]), float(steps[-1]), 0, 1, is_tight=True, is_whole=True)
    assert axis.ticks
    assert all(tick == int(tick) for tick in axis.ticks)
    assert bottom[-len(axis.ticks) :] == [tick_text(tick) for tick in axis.ticks]


def test_nice_ticks_are_one_two_or_five_times_a_power_of_ten_apart():
    assert nice_ticks(0.0, 1.0) == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert nice_ticks(0.0, 0.001) == (0.0, 0.0002, 0.0004, 0.0006, 0.0008, 0.001)
    assert nice_ticks(-3.0, 20.0) == (-5.0, 0.0, 5.0, 10.0, 15.0, 20.0)


def test_a_missing_value_breaks_the_curve_and_a_lone_point_is_visible():
    points = [(1.0, 1.0), (2.0, 2.0), (3.0, None), (4.0, 3.0), (5.0, None), (6.0, 2.0)]
    svg = line_chart("Loss", "nats", [Series("train", points)])
    path = parse(svg).find(f"{SVG}path[@class='curve a']").get("d")
    assert re.sub(r"[-\d. ]", "", path) == "MhLMhMh"  # three pieces; h0 makes a dot of a piece with one point


def test_two_curves_have_a_legend_and_one_has_none():
    train, evaluated = Series("train", [(1.0, 2.0)]), Series("eval", [(1.0, 2.1)], "b")
    assert ">train</text>" in line_chart("Loss", "nats", [train, evaluated])
    assert ">eval</text>" in line_chart("Loss", "nats", [train, evaluated])
    assert ">train</text>" not in line_chart("Loss", "nats", [train, Series("eval", [], "b")])


def test_few_points_are_drawn_as_dots_and_many_are_not():
    def dots(count):
        return line_chart("Loss", "nats", [Series("eval", [(float(x), 1.0) for x in range(count)])]).count("<circle")

    assert dots(charts.DOTS_UP_TO) == charts.DOTS_UP_TO
    assert dots(charts.DOTS_UP_TO + 1) == 0


def test_names_are_escaped():
    hostile = '<script>alert("1")</script>'
    svg = line_chart(hostile, hostile, [Series(hostile, [(1.0, 1.0)]), Series(hostile, [(1.0, 1.0)])], hostile)
    assert "<script" not in svg
    assert parse(svg).get("aria-label") == hostile
    assert "<script" not in line_chart(hostile, "", [])
