"""Packing plans: which pieces of which documents make up each row. Pure NumPy over document lengths.

`data.prepare` calls `plan_rows` once for each source and split and writes the result; `data.prepared` maps it.
A segment is a run of input positions of one document: position i holds token i, its target is token i + 1 of the same
document, so a document of n tokens has n - 1 positions and every position has a target. (Rows of labelled documents
hold whole documents: all n tokens are positions.)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int, Int64, Shaped

SEGMENT = np.dtype([("document", "<u4"), ("start", "<u4"), ("length", "<u4")])
WINDOW = 10_000


@dataclass(frozen=True)
class Plan:
    """Rows as ranges of segments: row r holds `segments[rows[r]:rows[r + 1]]`."""

    rows: Int64[np.ndarray, " borders"]
    segments: Shaped[np.ndarray, " S"]

    def __len__(self) -> int:
        return len(self.rows) - 1


def plan_rows(
    documents: Int[np.ndarray, " N"], num_positions: Int[np.ndarray, " N"], row_length: int, packing: str
) -> Plan:
    """The rows of these documents (global numbers), each with at least one position.

    `concatenate`: their positions form one stream that is cut every `row_length`; the last row may be short.
    `best_fit`: pieces of `row_length` are cut off longer documents; the rest goes, largest first, into the row of its
    window of 10,000 documents with the least room that suffices (best-fit decreasing), so a document that fits in a row
    is whole.
    `single`: a row each, cut at `row_length` (prepare has refused longer documents unless told to truncate).
    """
    lengths = num_positions.astype(np.int64)
    if packing == "single":
        segments = _segments(documents, np.zeros_like(lengths), np.minimum(lengths, row_length))
        return Plan(np.arange(len(documents) + 1, dtype=np.int64), segments)
    if packing == "best_fit":
        return _best_fit(documents, lengths, row_length)
    return _concatenate(documents, lengths, row_length)


def _concatenate(documents: np.ndarray, lengths: np.ndarray, row_length: int) -> Plan:
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    borders = np.arange(0, total, row_length)
    begins = np.union1d(borders, ends - lengths)  # a segment begins where a row or a document begins
    document = np.searchsorted(ends, begins, side="right")
    start = begins - (ends - lengths)[document]
    rows = np.append(np.searchsorted(begins, borders), len(begins))
    return Plan(rows.astype(np.int64), _segments(documents[document], start, np.diff(begins, append=total)))


def _best_fit(documents: np.ndarray, lengths: np.ndarray, row_length: int) -> Plan:
    num_full = lengths // row_length
    rest = lengths - num_full * row_length
    # Full pieces: each is a row of its own.
    full_document = np.repeat(np.arange(len(lengths)), num_full)
    piece = np.arange(len(full_document)) - np.repeat(np.cumsum(num_full) - num_full, num_full)
    # Rests: packed window by window.
    rest_document = np.flatnonzero(rest)
    row = np.empty(len(rest_document), np.int64)
    num_rows = len(full_document)
    window = rest_document // WINDOW
    for first, last in _runs(window):
        row[first:last], used = _pack_window(rest[rest_document[first:last]], row_length)
        row[first:last] += num_rows
        num_rows += used
    document = np.concatenate([full_document, rest_document])
    start = np.concatenate([piece * row_length, (num_full * row_length)[rest_document]])
    length = np.concatenate([np.full(len(full_document), row_length), rest[rest_document]])
    in_row = np.concatenate([np.arange(len(full_document)), row])
    order = np.lexsort((document, in_row))
    rows = np.searchsorted(in_row[order], np.arange(num_rows + 1))
    return Plan(rows.astype(np.int64), _segments(documents[document[order]], start[order], length[order]))


def _pack_window(sizes: np.ndarray, row_length: int) -> tuple[np.ndarray, int]:
    """The row of each item, and the number of rows. Bit c of `room` is on when some row has c positions left."""
    rows = np.empty(len(sizes), np.int64)
    num_rows = 0
    room = 0
    rows_with: list[list[int]] = [[] for _ in range(row_length)]
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        fitting = room >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[left].pop()
            if not rows_with[left]:
                room ^= 1 << left
        else:
            left, row = row_length, num_rows
            num_rows += 1
        rows[item] = row
        left -= size
        if left:
            rows_with[left].append(row)
            room |= 1 << left
    return rows, num_rows


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    borders = np.flatnonzero(np.diff(values)) + 1
    edges = [0, *borders.tolist(), len(values)]
    return [(first, last) for first, last in pairwise(edges) if last > first]


def _segments(document: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    segments = np.empty(len(document), SEGMENT)
    segments["document"], segments["start"], segments["length"] = document, start, length
    return segments
