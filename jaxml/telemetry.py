"""The wall-clock account of a run: every second since the process started belongs to exactly one kind.

Reads no other jaxml file and no jax. The recipe owns one `WallClock`; `observe.summary` and `observe.report` show it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["import", "compile", "data_wait", "step", "eval", "checkpoint", "restart", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class WallClock:
    """Charges each second to the innermost open span, so the account sums to the wall time by construction.

    Time outside every span is `import` until `mark_imported`, then `other`. Not for several threads: the thread that
    runs the steps owns it.

    Arguments:
      now: a monotonic clock, seconds.
      age_s: how long the process has lived already; None asks the operating system, so that the start of the
        interpreter and the imports before this object count too.

    >>> ticks = iter([10.0, 11.0, 14.0, 15.0, 15.0])
    >>> clock = WallClock(now=lambda: next(ticks), age_s=2.0)
    >>> clock.mark_imported()
    >>> with clock.span("eval"):
    ...     pass
    >>> {kind: seconds for kind, seconds in clock.summary().items() if seconds}
    {'import': 3.0, 'eval': 1.0, 'other': 3.0}
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, age_s: float | None = None):
        self._now = now
        self._charged_to = now()
        self._base: Kind = "import"
        self._open: list[Kind] = []
        self._seconds: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        self._previous: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        self._seconds["import"] = process_age_s() if age_s is None else age_s

    @contextmanager
    def span(self, kind: Kind) -> Iterator[None]:
        """Charge the body to `kind`, except for what spans inside it take."""
        self._charge()
        self._open.append(kind)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def add(self, kind: Kind, seconds: float) -> None:
        """Charge `seconds` that passed lately, and that other code measured, to `kind` instead of the span open now.

        At most what that span's kind holds is moved: the sum never changes and no kind becomes negative.
        """
        current = self._charge()
        moved = min(max(seconds, 0.0), self._seconds[current])
        self._seconds[current] -= moved
        self._seconds[kind] += moved

    def mark_imported(self) -> None:
        """Imports are over: what lies outside every span is `other` from now on."""
        self._charge()
        self._base = "other"

    def mark_restarted(self) -> None:
        """Call before the first step of a resumed run: what this process did so far, except `import` and `compile`,
        was the price of the `restart` (finding and restoring the checkpoint, seeking, setting up)."""
        self._charge()
        for kind in KINDS:
            if kind not in ("import", "compile", "restart"):
                self._seconds["restart"] += self._seconds[kind]
                self._seconds[kind] = 0.0

    def add_previous(self, seconds: Mapping[str, float]) -> None:
        """Add the `summary` that earlier processes of the same run left. Raises KeyError for an unknown kind."""
        for kind, spent in seconds.items():
            self._previous[kind] += spent  # type: ignore[index]

    def summary(self) -> dict[str, float]:
        """Seconds by kind, in the order of `KINDS`: the life of this process, and what `add_previous` brought."""
        self._charge()
        return {kind: self._seconds[kind] + self._previous[kind] for kind in KINDS}

    def shares(self) -> dict[str, float]:
        """The fraction of the wall time that each kind took; they sum to 1."""
        seconds = self.summary()
        total = sum(seconds.values())
        return {kind: spent / total if total else float(kind == "other") for kind, spent in seconds.items()}

    def _charge(self) -> Kind:
        """Charge the time since the last call to the innermost open span, and return its kind."""
        now = self._now()
        current = self._open[-1] if self._open else self._base
        self._seconds[current] += now - self._charged_to
        self._charged_to = now
        return current


def process_age_s(stat: Path = Path("/proc/self/stat")) -> float:
    """Seconds since the operating system started this process; 0 where it does not say (not Linux).

    Field 22 of `proc_pid_stat(5)`: the start in clock ticks (10 ms) after boot.
    """
    try:
        fields = stat.read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
    # The processor time bounds the age from below; a sandbox that reports no start time says 0 ticks.
    return age_s if started_s > 0 and age_s >= 0 else 0.0
