"""Packing loses no position, repeats none, and fills rows as well as a plain best-fit does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.data import packing
from jaxml.data.packing import plan_rows

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def as_rows(plan: packing.Plan) -> list[list[tuple[int, int, int]]]:
    return [plan.segments[a:b].tolist() for a, b in zip(plan.rows[:-1], plan.rows[1:], strict=True)]


def plan(lengths: list[int], row_length: int, kind: str) -> list[list[tuple[int, int, int]]]:
    numbers = 10 + 3 * np.arange(len(lengths))  # documents of one source and split are not consecutive
    return as_rows(plan_rows(numbers, np.array(lengths, np.int64), row_length, kind))


@pytest.mark.parametrize("kind", ["concatenate", "best_fit"])
@given(lengths=LENGTHS, row_length=st.integers(1, 25))
def test_every_position_of_every_document_is_in_exactly_one_place(
    kind: str, lengths: list[int], row_length: int
) -> None:
    rows = plan(lengths, row_length, kind)
    positions = [(document, start + i) for row in rows for document, start, length in row for i in range(length)]
    assert sorted(positions) == [(10 + 3 * n, i) for n, length in enumerate(lengths) for i in range(length)]
    assert all(0 < sum(length for _, _, length in row) <= row_length for row in rows)


@given(lengths=LENGTHS, row_length=st.integers(1, 25))
def test_concatenated_rows_are_full_and_in_the_order_of_the_stream(lengths: list[int], row_length: int) -> None:
    rows = plan(lengths, row_length, "concatenate")
    assert all(sum(segment[2] for segment in row) == row_length for row in rows[:-1])
    stream = [(document, start) for row in rows for document, start, _ in row]
    assert stream == sorted(stream)


@given(lengths=LENGTHS, row_length=st.integers(1, 25))
def test_best_fit_cuts_a_document_only_where_it_is_longer_than_a_row(lengths: list[int], row_length: int) -> None:
    segments = [segment for row in plan(lengths, row_length, "best_fit") for segment in row]
    for number, length in enumerate(lengths):
        pieces = sorted(piece for document, _, piece in segments if document == 10 + 3 * number)
        assert pieces == sorted(
            [row_length] * (length // row_length) + [length % row_length] * (length % row_length > 0)
        )


@given(lengths=LENGTHS, row_length=st.integers(1, 25))
def test_best_fit_leaves_the_room_that_the_textbook_leaves(lengths: list[int], row_length: int) -> None:
    room = [0] * sum(length // row_length for length in lengths)
    for size in sorted((length % row_length for length in lengths if length % row_length), reverse=True):
        best = min((i for i, left in enumerate(room) if left >= size), key=lambda i: room[i], default=None)
        if best is None:
            room.append(row_length - size)
        else:
            room[best] -= size
    rows = plan(lengths, row_length, "best_fit")
    assert sorted(row_length - sum(length for _, _, length in row) for row in rows) == sorted(room)


def test_best_fit_packs_within_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "WINDOW", 2)
    assert [[s[0] for s in row] for row in plan([6, 4, 4, 6, 6, 4], 10, "best_fit")] == [[10, 13], [16, 19], [22, 25]]
    # The 5 of the second window cannot join the 5 of the first.
    assert len(plan([5, 9, 5, 9], 10, "best_fit")) == 4


def test_single_gives_a_row_each_and_cuts_at_its_end() -> None:
    assert plan([3, 50, 1], 10, "single") == [[(10, 0, 3)], [(13, 0, 10)], [(16, 0, 1)]]


def test_a_hundred_thousand_documents_are_planned_at_once() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 100_000).astype(np.int64) + 1
    found = plan_rows(np.arange(len(lengths)), lengths, 1024, "best_fit")
    assert lengths.sum() / (len(found) * 1024) > 0.99
