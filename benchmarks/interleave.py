"""Compare rivals fairly on a shared machine: turns A/B/A, the median of five, and no number at all when they scatter.

Each rival is a function that measures itself once and returns the value (tokens/s, seconds, bytes/s). Rivals take turns
in rounds, A B then B A, so that a slow minute hits all of them alike and neither always goes first. Read by
`benchmarks/run.py`; needs nothing but Python.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_SPREAD = 0.15
REPEATS = 5


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
    """One line of the result table: all repeats of one rival, in `unit`."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """(max - min) / median; 0 for a single repeat."""
        return (max(self.values) - min(self.values)) / self.median

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "spread": round(self.spread, 4),
            "values": list(self.values),
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
    for measure in rivals.values():
        measure()
    values: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(repeats):
        order = list(rivals) if turn % 2 == 0 else list(reversed(rivals))
        for name in order:
            values[name].append(rivals[name]())
    rows = {name: Row(name, unit, tuple(measured)) for name, measured in values.items()}
    noisiest = max(rows.values(), key=lambda row: row.spread)
    if noisiest.spread > max_spread:
        raise NoisyMeasurementError(noisiest, max_spread)
    return rows


def ratio(rows: Mapping[str, Row], of: str, to: str) -> Row:
    """`of` / `to`, repeat by repeat: what slows both in one round cancels."""
    pairs = zip(rows[of].values, rows[to].values, strict=True)
    return Row(f"{of} / {to}", "ratio", tuple(ours / theirs for ours, theirs in pairs))
