"""A claim that was tried, and how two sets of arrays are compared: the bound in float64, and what it leaves out.

Reads no other jaxml file; every file of `prove` makes claims, `prove.report` and `prove.page` show them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

# Of the larger of a leaf's largest magnitude and FLOOR times that of the largest leaf (design/style.md).
BOUND, FLOOR = 1e-9, 1e-6
# Two values are apart, when the first such value is looked for, from this share of the bound on: what parts at one value
# may be larger at the next, and equal ones differ by rounding, about 1e-15.
PARTED = 1e-2

Leaves: TypeAlias = Mapping[str, np.ndarray]
Point: TypeAlias = tuple[float, float | None]


@dataclass(frozen=True)
class Parting:
    """The first value, in program order, in which two runs differ: what it is called, which file made it, how far apart
    (as a share of its largest magnitude)."""

    name: str
    made_by: str
    error: float

    def __str__(self) -> str:
        return f"{self.name}, made by {self.made_by}, {self.error:.2g} apart"


@dataclass(frozen=True)
class Picture:
    """A line chart for the page: `curves` are (name, points)."""

    title: str
    y_name: str
    curves: tuple[tuple[str, tuple[Point, ...]], ...]
    x_name: str = "step"


@dataclass(frozen=True)
class Claim:
    """One line of the table. `error` and `bound`: shares of a leaf's scale (see `distances`), or a count and 0 where
    nothing but equality will do. `float32`: the same error with float32 in the place of float64, where it was measured."""

    group: str
    name: str
    error: float
    bound: float
    detail: str = ""
    float32: float | None = None
    parting: Parting | None = None
    seconds: float = 0.0
    pictures: tuple[Picture, ...] = field(default=(), repr=False)

    @property
    def verdict(self) -> Literal["pass", "fail"]:
        """NaN fails."""
        return "pass" if self.error <= self.bound else "fail"

    def to_json(self) -> dict[str, Any]:
        """What proof.json and `--json` say; an error that is not a number is `null`."""
        parting = self.parting and {"name": self.parting.name, "made_by": self.parting.made_by}
        return {
            "name": f"{self.group}: {self.name}",
            "error": _finite(self.error),
            "bound": self.bound,
            "verdict": self.verdict,
            "float32_error": _finite(self.float32),
            "detail": self.detail,
            "first_parting": parting,
            "seconds": round(self.seconds, 2),
        }


def distances(got: Leaves, expected: Leaves, ignored: Leaves | None = None) -> dict[str, float]:
    """For each leaf of `expected`, in order, its largest difference as a share of its scale: the larger of its largest
    magnitude and FLOOR times that of the largest leaf. Elements that `ignored` [leaf: bool mask] marks do not count.

    Infinite where a leaf is missing, has another shape or is not a number, and where an integer or a key differs.

    >>> distances({"a": np.array([1.0, 2.0])}, {"a": np.array([1.0, 2.5])})
    {'a': 0.2}
    """
    largest = max((_magnitude(leaf) for leaf in expected.values() if _is_real(leaf)), default=0.0)
    found = {}
    for path, leaf in expected.items():
        other = got.get(path)
        if other is None or other.shape != leaf.shape:
            found[path] = math.inf
        elif not _is_real(leaf):
            found[path] = 0.0 if np.array_equal(other, leaf) else math.inf
        else:
            difference = np.abs(other.astype(np.float64) - leaf.astype(np.float64))
            if ignored is not None and path in ignored:
                difference = np.where(ignored[path], 0.0, difference)
            apart, scale = float(np.max(difference, initial=0.0)), max(_magnitude(leaf), FLOOR * largest)
            found[path] = 0.0 if apart == 0.0 else apart / scale if scale > 0 and math.isfinite(apart) else math.inf
    found |= {path: math.inf for path in got if path not in expected}
    return found


def undecided(got: Leaves, expected: Leaves) -> dict[str, np.ndarray]:
    """Masks of the gradient's elements that may be rounding alone: not larger than BOUND times their leaf's scale, and not
    equal. The update rules divide by the gradient's own size or take its sign, so that of these nothing follows."""
    largest = max((_magnitude(leaf) for leaf in expected.values()), default=0.0)
    masks = {}
    for path, leaf in expected.items():
        floor = BOUND * max(_magnitude(leaf), FLOOR * largest)
        masks[path] = (np.minimum(np.abs(leaf), np.abs(got[path])) <= floor) & (leaf != got[path])
    return masks


def worst(errors: Mapping[str, float]) -> float:
    """The largest of some errors; 0 of none."""
    return max(errors.values(), default=0.0)


def exact(group: str, name: str, faults: Iterable[str], detail: str) -> Claim:
    """A claim of plain equality: as many errors as there are `faults`, the first of which are told."""
    found = list(faults)
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return Claim(group, name, float(len(found)), 0.0, "; ".join(found[:3]) + more or detail)


def _finite(error: float | None) -> float | None:
    return error if error is not None and math.isfinite(error) else None


def _is_real(leaf: np.ndarray) -> bool:
    return np.issubdtype(leaf.dtype, np.floating) or leaf.dtype.kind == "V" or leaf.dtype.name == "bfloat16"


def _magnitude(leaf: np.ndarray) -> float:
    return float(np.max(np.abs(leaf.astype(np.float64)), initial=0.0)) if _is_real(leaf) else 0.0
