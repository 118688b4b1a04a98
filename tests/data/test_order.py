"""Order is arithmetic: exact counts, each row once an epoch, an exact inverse, seeks that cost nothing."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxml.data.order import Order
from jaxml.errors import DataError

SOURCES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 7)), min_size=1, max_size=4)
SKIPPED = st.lists(st.integers(0, 40), max_size=8, unique=True).map(sorted)


def make(sources: list[tuple[int, int]], skipped: list[int] | tuple[int, ...] = (), seed: int = 3) -> Order:
    return Order([rows for rows, _ in sources], [weight for _, weight in sources], seed, skipped)


@settings(max_examples=50)
@given(sources=SOURCES, skipped=SKIPPED, batch_size=st.integers(1, 9), first=st.integers(0, 20))
def test_steps_of_inverts_slots(
    sources: list[tuple[int, int]], skipped: list[int], batch_size: int, first: int
) -> None:
    order = make(sources, skipped)
    steps = range(first, first + 15)
    seen = {step: order.slots(step, batch_size) for step in steps}
    for source, (rows, _) in enumerate(sources):
        for row in {0, rows - 1, rows // 2}:
            expected = [step for step, (s, r, _) in seen.items() if ((s == source) & (r == row)).any()]
            assert order.steps_of(source, row, steps[0], steps[-1] + 1, batch_size) == expected


@settings(max_examples=50)
@given(sources=SOURCES, batch_size=st.integers(20, 90), epochs=st.integers(1, 2))
def test_each_row_comes_exactly_once_an_epoch(sources: list[tuple[int, int]], batch_size: int, epochs: int) -> None:
    order = make(sources)
    total = sum(order.weights)
    slots = max(epochs * -(-rows * total // weight) for (rows, _), weight in zip(sources, order.weights, strict=True))
    steps = range(-(-(slots + total) // batch_size))
    source, row, epoch = (
        np.concatenate(part) for part in zip(*(order.slots(s, batch_size) for s in steps), strict=True)
    )
    for index, (rows, _) in enumerate(sources):
        for number in range(epochs):
            assert sorted(row[(source == index) & (epoch == number)].tolist()) == list(range(rows))


@given(sources=SOURCES, rounds=st.integers(0, 10**9))
def test_every_round_of_the_mix_has_exactly_its_weights(sources: list[tuple[int, int]], rounds: int) -> None:
    order = make(sources)
    total = sum(order.weights)
    source, _, _ = order.slots(rounds, total)
    assert np.bincount(source, minlength=len(sources)).tolist() == list(order.weights)


@given(sources=SOURCES, count=st.integers(1, 200))
def test_the_mix_is_even_over_any_prefix(sources: list[tuple[int, int]], count: int) -> None:
    order = make(sources)
    counts = np.bincount(order.slots(0, count)[0], minlength=len(sources))
    wanted = count * np.array(order.weights) / sum(order.weights)
    assert np.abs(counts - wanted).max() <= len(sources)


@settings(max_examples=50)
@given(sources=SOURCES, skipped=SKIPPED)
def test_skipped_steps_are_left_out_and_nothing_else_moves(sources: list[tuple[int, int]], skipped: list[int]) -> None:
    straight, order = make(sources), make(sources, skipped)
    kept = [step for step in range(60) if step not in skipped][:20]
    for step, data_step in enumerate(kept):
        assert order.data_step(step) == data_step
        assert order.global_step(data_step) == step
    for step in (0, 7, 19):
        np.testing.assert_array_equal(order.slots(step, 4), straight.slots(kept[step], 4))
    assert all(order.global_step(step) is None for step in skipped)


def test_a_share_of_the_batch_is_a_slice_of_it_for_any_number_of_processes() -> None:
    order = make([(17, 3), (5, 2)])
    whole = np.stack(order.slots(11, 12))
    for num_processes in (1, 2, 3, 4, 6, 12):
        share = 12 // num_processes
        parts = [np.stack(order.slots(11, 12, lo, lo + share)) for lo in range(0, 12, share)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_seeking_far_costs_no_more_than_the_first_step() -> None:
    order = make([(10**7, 3), (999, 1)], tuple(range(5, 10_000, 7)))
    begun = time.perf_counter()
    order.slots(1_000_000, 512)
    order.slots(10**12, 512)
    assert time.perf_counter() - begun < 0.5


def test_common_factors_of_weights_do_not_matter() -> None:
    np.testing.assert_array_equal(make([(9, 6), (4, 2)]).slots(5, 16), make([(9, 3), (4, 1)]).slots(5, 16))


@pytest.mark.parametrize(("rows", "weights", "skipped"), [((3, 0), (1, 1), ()), ((3,), (0,), ()), ((3,), (1,), (4, 2))])
def test_a_source_without_rows_or_weight_and_unsorted_skips_are_refused(
    rows: tuple[int, ...], weights: tuple[int, ...], skipped: tuple[int, ...]
) -> None:
    with pytest.raises(DataError):
        Order(rows, weights, 0, skipped)
