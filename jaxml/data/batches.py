"""Rows to batches: dictionaries of NumPy arrays, for a training step or a slice of the held-out split.

Reads `data.order` and `data.prepared`; `data.loader` runs ahead over `TrainBatches`, evaluation walks `EvalBatches`.
A language-modelling batch has `tokens`, `targets`, `positions`, `segment_ids` int32 [B, T] and `loss_mask` bool [B, T];
one of labelled documents has `tokens`, `positions`, `segment_ids`, `label` int32 [B] and `is_valid` bool [B]. Both have
`row` (number within the global batch), `record` (row of its source) and `source`, int32 [B]. Positions restart at 0 in
each segment; segment ids count from 1, padding is 0.

Of several processes each may ask for a share, rows `lo` to `hi` as a smaller batch; or for the batch in its whole shape, which
says of every row where it came from, with only the rows `filled` read from the data (the others are zero).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxml.data.order import Order
from jaxml.data.prepared import Prepared
from jaxml.errors import DataError

Batch = dict[str, np.ndarray]


class TrainBatches:
    """The batch of any training step. `lo`, `hi`: the share of the global batch that this process wants. `filled`: the
    rows of it, by their numbers in the global batch, that are read (None: all)."""

    def __init__(
        self,
        prepared: Prepared,
        batch_size: int,
        skipped: Sequence[int] = (),
        lo: int = 0,
        hi: int | None = None,
        filled: tuple[int, int] | None = None,
    ):
        self.prepared, self.batch_size, self.filled = prepared, batch_size, filled
        self.lo, self.hi = _check_rows(batch_size, lo, hi)
        weights = [source.weight for source in prepared.spec.sources]
        self.order = Order(prepared.num_rows("train"), weights, prepared.spec.seed, skipped)

    def batch(self, step: int) -> Batch:
        """The batch of a global step (from 0): the same one, whoever asks and whenever."""
        sources, rows, _ = self.order.slots(step, self.batch_size, self.lo, self.hi)
        return assemble(self.prepared, "train", sources, rows, self.lo, self.filled)


class EvalBatches:
    """The held-out split, each row exactly once; the last batch is filled up with rows that weigh nothing. `lo`, `hi`,
    `filled`: as in TrainBatches."""

    def __init__(
        self,
        prepared: Prepared,
        batch_size: int,
        lo: int = 0,
        hi: int | None = None,
        filled: tuple[int, int] | None = None,
    ):
        self.prepared, self.batch_size, self.filled = prepared, batch_size, filled
        self.lo, self.hi = _check_rows(batch_size, lo, hi)
        self._ends = np.cumsum(prepared.num_rows("held_out"))

    def __len__(self) -> int:
        return -(-int(self._ends[-1]) // self.batch_size)

    def batch(self, index: int) -> Batch:
        """Batch `index` of `len(self)`. Padding rows have record and source -1."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        every = np.arange(index * self.batch_size + self.lo, index * self.batch_size + self.hi)
        is_row = every < self._ends[-1]
        sources = np.where(is_row, np.searchsorted(self._ends, every, side="right"), -1)
        begins = np.append(0, self._ends)[np.maximum(sources, 0)]
        rows = np.where(is_row, every - begins, -1)
        return assemble(self.prepared, "held_out", sources, rows, self.lo, self.filled)


def assemble(
    prepared: Prepared,
    split: str,
    sources: Int[np.ndarray, " B"],
    rows: Int[np.ndarray, " B"],
    first_row: int = 0,
    filled: tuple[int, int] | None = None,
) -> Batch:
    """The batch of these rows (row -1: padding); `first_row` is the first one's number within the global batch, where
    the range `filled` says which rows are read (None: all)."""
    shape = (len(rows), prepared.spec.sequence_length)
    has_labels = bool(prepared.labels)
    batch: Batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segment_ids")}
    if has_labels:
        batch |= {"label": np.zeros(len(rows), np.int32), "is_valid": rows >= 0}
    else:
        batch |= {"targets": np.zeros(shape, np.int32), "loss_mask": np.zeros(shape, np.bool_)}
    is_read = np.full(len(rows), filled is None)
    if filled is not None:
        is_read[max(filled[0] - first_row, 0) : max(filled[1] - first_row, 0)] = True
    for index in np.flatnonzero(is_read & (rows >= 0)).tolist():
        begin = 0
        segments = prepared.segments(split, int(sources[index]), int(rows[index])).tolist()
        for number, (document, start, length) in enumerate(segments, 1):
            here = slice(begin, begin + length)
            tokens = prepared.tokens(document, start, length if has_labels else length + 1)
            batch["tokens"][index, here] = tokens[:length]
            batch["positions"][index, here] = np.arange(length)
            batch["segment_ids"][index, here] = number
            if has_labels:
                batch["label"][index] = prepared.documents["label"][document]
            else:
                batch["targets"][index, here] = tokens[1:]
                batch["loss_mask"][index, here] = True
            begin += length
    batch["row"] = np.arange(first_row, first_row + len(rows), dtype=np.int32)
    return batch | {"record": rows.astype(np.int32), "source": sources.astype(np.int32)}


def _check_rows(batch_size: int, lo: int, hi: int | None) -> tuple[int, int]:
    last = batch_size if hi is None else hi
    if not 0 <= lo < last <= batch_size:
        raise DataError(
            "rows of the batch",
            expected=f"0 <= lo < hi <= batch_size ({batch_size}, at least 1)",
            got=f"lo {lo}, hi {last}",
            todo="give each process a share of the batch",
        )
    return lo, last
