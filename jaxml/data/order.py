"""Which rows make up global step N, and which steps saw a row: pure arithmetic, both ways (format C).

Reads `data.permutation`; `data.batches` makes the batches and `seen` asks for the inverse. Slot g of the endless stream
of rows belongs to data step g // batch_size, whatever the hosts, devices or accumulation. A slot goes to a source by
its weight, and the k-th slot of a source is place k % n of its epoch k // n, which the keyed permutation makes a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from jaxml.data.permutation import derive_keys, permute, unpermute
from jaxml.errors import DataError


class Order:
    """The order of `rows_per_source` rows mixed by integer `weights`.

    In every round of sum(weights) slots, source s has exactly weights[s]; its rows all come once an epoch. `skipped`
    are the data steps left out: global step N reads the N-th data step that is not among them. Steps count from 0.
    """

    def __init__(self, rows_per_source: Sequence[int], weights: Sequence[int], seed: int, skipped: Sequence[int] = ()):
        is_right = len(rows_per_source) == len(weights) > 0 and min(rows_per_source) > 0 and min(weights) > 0
        if not is_right:
            raise DataError(
                "order of rows",
                expected="one positive weight and at least one row for each source",
                got=f"rows {tuple(rows_per_source)}, weights {tuple(weights)}",
                todo="leave a source without rows out of the mix",
            )
        if list(skipped) != sorted({step for step in skipped if step >= 0}):
            raise DataError(
                "skipped steps",
                expected="data steps in ascending order, each once",
                got=str(tuple(skipped))[:80],
                todo="sort them and leave out repetitions",
            )
        divisor = math.gcd(*weights)
        self.rows_per_source = tuple(int(rows) for rows in rows_per_source)
        self.weights = tuple(int(weight) // divisor for weight in weights)
        self.seed = seed
        self.skipped = tuple(int(step) for step in skipped)
        self._skipped = np.array(self.skipped, np.int64)
        self._kept_before = self._skipped - np.arange(len(self._skipped))

    def data_step(self, step: int) -> int:
        """The data step that a global step reads."""
        return step + int(np.searchsorted(self._kept_before, step, side="right"))

    def global_step(self, data_step: int) -> int | None:
        """The global step that reads a data step (None: it is skipped)."""
        index = int(np.searchsorted(self._skipped, data_step))
        is_skipped = index < len(self.skipped) and self.skipped[index] == data_step
        return None if is_skipped else data_step - index

    def slots(
        self, step: int, batch_size: int, lo: int = 0, hi: int | None = None
    ) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
        """(source, row of the source, epoch of the source) of rows `lo` to `hi` of a step's batch."""
        first = self.data_step(step) * batch_size
        slots = np.arange(first + lo, first + (batch_size if hi is None else hi), dtype=np.int64)
        sources, places = self._split(slots)
        rows, epochs = np.empty_like(slots), np.empty_like(slots)
        for source, count in enumerate(self.rows_per_source):
            mine = np.flatnonzero(sources == source)
            if mine.size:
                epochs[mine] = places[mine] // count
                keys = derive_keys(self.seed, source, epochs[mine])
                rows[mine] = permute(places[mine] % count, count, keys)
        return sources, rows, epochs

    def steps_of(self, source: int, row: int, first: int, last: int, batch_size: int) -> list[int]:
        """The steps in [first, last) whose batch holds a row: the inverse of `slots`."""
        if last <= first:
            return []
        begin = self.data_step(first) * batch_size
        end = (self.data_step(last - 1) + 1) * batch_size
        count = self.rows_per_source[source]
        places_before = self._count_before(source, np.array([begin, end], np.int64))
        epochs = np.arange(places_before[0] // count, places_before[1] // count + 1)
        keys = derive_keys(self.seed, source, epochs)
        places = epochs * count + unpermute(np.full(epochs.shape, row, np.int64), count, keys)
        slots = self._join(source, places)
        data_steps = np.unique(slots[(slots >= begin) & (slots < end)] // batch_size)
        steps = (self.global_step(int(data_step)) for data_step in data_steps)
        return [step for step in steps if step is not None]

    def _split(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each slot, and its place among the slots of that source.

        Source by source against all later ones: of the first g slots, floor(g a / (a + b)) go to weight a, the
        rest to b.
        """
        sources, places = np.full_like(slots, len(self.weights) - 1), slots.copy()
        open_ = np.arange(len(slots))
        for source, weight in enumerate(self.weights[:-1]):
            total = sum(self.weights[source:])
            left = places[open_]
            before, after = _floor_share(left, weight, total), _floor_share(left + 1, weight, total)
            is_mine = after > before
            sources[open_[is_mine]] = source
            places[open_] = np.where(is_mine, before, left - before)
            open_ = open_[~is_mine]
        return sources, places

    def _join(self, source: int, places: np.ndarray) -> np.ndarray:
        """The slot of each place of a source: the inverse of `_split`."""
        slots = places
        weights = self.weights
        if source < len(weights) - 1:
            total = sum(weights[source:])
            # Smallest g with floor((g + 1) a / total) = k + 1.
            slots = -_floor_share(-(slots + 1), total, weights[source]) - 1
        for earlier in reversed(range(source)):
            total = sum(weights[earlier:])
            # Largest g with g - floor(g a / total) = ceil(g b / total) <= k.
            slots = _floor_share(slots, total, total - weights[earlier])
        return slots

    def _count_before(self, source: int, slots: np.ndarray) -> np.ndarray:
        """How many of the first `slots` slots belong to a source."""
        left = slots
        for earlier in range(source):
            left = left - _floor_share(left, self.weights[earlier], sum(self.weights[earlier:]))
        if source == len(self.weights) - 1:
            return left
        return _floor_share(left, self.weights[source], sum(self.weights[source:]))


def _floor_share(count: np.ndarray, numerator: int, denominator: int) -> np.ndarray:
    """floor(count * numerator / denominator) without leaving 64 bits: the product is taken of the remainder only."""
    whole, rest = np.divmod(count, denominator)
    return whole * numerator + rest * numerator // denominator
