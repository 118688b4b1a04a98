"""Compare rivals fairly on a shared machine: turns A/B/A, the median of five, and no number at all when they scatter.

Each rival is a function that measures itself once and returns the value (tokens/s, seconds, bytes/s). Rivals take turns
in rounds, A B then B A, so that a slow minute hits all of them alike and neither always goes first. Read by
`benchmarks/run.py`; needs nothing but Python.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

MAX_SPREAD = 0.15
REPEATS = 5
Sample = TypeVar("Sample")


class NoisyMeasurementError(Exception):
    """The repeats of one row differ by more than the limit, so that its median means little."""

    def __init__(self, row: Row, limit: float) -> None:
        values = ", ".join(f"{value:.4g}" for value in row.values)
        super().__init__(
            f"the measurement `{row.name}` is refused: spread (max - min) / median too large\n"
            f"  expected: at most {limit:.0%}\n"
            f"  got: {row.spread:.0%} ({values} {row.unit})\n"
            f"  todo: run again while nothing else uses the machine, or measure longer per repeat"
        )
        self.row = row


@dataclass(frozen=True)
class Row:
    """One line of the result table: all repeats of one rival, in `unit`.

    `is_bound`: the row stands for its largest value, not for its median, so scatter makes it worse and never void.
    """

    name: str
    unit: str
    values: tuple[float, ...]
    is_bound: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """(max - min) / median; 0 for a single repeat."""
        return (max(self.values) - min(self.values)) / self.median

    @property
    def value(self) -> float:
        """What the row stands for: the median, or the largest repeat of a bound."""
        return max(self.values) if self.is_bound else self.median

    def is_refused(self, max_spread: float = MAX_SPREAD) -> bool:
        """True when the repeats scatter too much for their median to mean anything."""
        return not self.is_bound and self.spread > max_spread

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "value": self.value,
            "median": self.median,
            "spread": round(self.spread, 4),
            "values": list(self.values),
            "is_bound": self.is_bound,
        }


def interleave(
    rivals: Mapping[str, Callable[[], float]],
    unit: str,
    repeats: int = REPEATS,
    max_spread: float = MAX_SPREAD,
) -> dict[str, Row]:
    """Let every rival measure itself `repeats` times in turns; rows by name, in the order of `rivals`.

    One unmeasured call each comes first (compilation, caches). Every second round runs backwards.
    Raises NoisyMeasurementError for the noisiest row when its spread exceeds `max_spread`.

    >>> rows = interleave({"a": lambda: 2.0, "b": lambda: 1.0}, unit="tokens/s", repeats=3)
    >>> rows["a"].median / rows["b"].median
    2.0
    """
    values = take_turns(rivals, repeats)
    rows = {name: Row(name, unit, tuple(measured)) for name, measured in values.items()}
    noisiest = max(rows.values(), key=lambda row: row.spread)
    if noisiest.is_refused(max_spread):
        raise NoisyMeasurementError(noisiest, max_spread)
    return rows


def take_turns(
    rivals: Mapping[str, Callable[[], Sample]], repeats: int = REPEATS, warm_ups: int = 1
) -> dict[str, list[Sample]]:
    """What every rival returned in its turns, after `warm_ups` rounds that do not count; every second one backwards.

    `warm_ups` 0 is for rivals that are processes of their own and warm up inside.
    """
    for _ in range(warm_ups):
        for measure in rivals.values():
            measure()
    samples: dict[str, list[Sample]] = {name: [] for name in rivals}
    for turn in range(repeats):
        for name in rivals if turn % 2 == 0 else reversed(list(rivals)):
            samples[name].append(rivals[name]())
    return samples


def ratio(rows: Mapping[str, Row], of: str, to: str) -> Row:
    """`of` / `to`, repeat by repeat: what slows both in one round cancels."""
    pairs = zip(rows[of].values, rows[to].values, strict=True)
    return Row(f"{of} / {to}", "ratio", tuple(ours / theirs for ours, theirs in pairs))
