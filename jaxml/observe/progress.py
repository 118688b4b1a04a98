"""The progress display on stderr: step, loss, tokens a second, data wait, time left.

Reads `observe.metrics_log` records; the recipe calls it once a step. On a terminal a rich bar, elsewhere a plain line
every few seconds. No thread: the bar moves when a step ends. No jax.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

WINDOW_STEPS = 50
LINE_EVERY_S = 5.0
DRAW_EVERY_S = 0.1


@runtime_checkable
class Stream(Protocol):
    """Where words go: a terminal, a file, a notebook."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...
    def isatty(self) -> bool: ...


class Unbreakable:
    """A stream whose reader may leave: what cannot be written is dropped, for a display must never end a run."""

    def __init__(self, stream: Stream):
        self._stream = stream

    def write(self, text: str, /) -> object:
        with contextlib.suppress(OSError, ValueError):
            return self._stream.write(text)

    def flush(self) -> object:
        with contextlib.suppress(OSError, ValueError):
            return self._stream.flush()

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self._stream.isatty()
        return False


class Progress:
    """What is shown is decided here, how it is drawn by a `Screen`.

    Arguments:
      total_steps: the last step of the run.
      first_step: the last step already done (a resumed run goes on after it).
      stream: where to write (None: stderr); a terminal gets the bar.
      now: a monotonic clock, seconds.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        stream: Stream | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        out = sys.stderr if stream is None else stream
        self._pace = Pace(total_steps, first_step, now())
        self._now = now
        self._drawn = float("-inf")
        self._screen: Screen = RichBar(out, total_steps, first_step) if out.isatty() else PlainLines(out)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Step `step` ended with these metrics: draw them if it is time, and always at the last step."""
        now = self._now()
        self._pace.observe(step, metrics, now)
        if now - self._drawn >= self._screen.every_s or step >= self._pace.total_steps:
            self._drawn = now
            self._screen.draw(step, self._pace.describe(step, metrics))

    def note(self, text: str) -> None:
        """A line that stays: an evaluation, a checkpoint, a guard event, `seeking to step 1,000,000`."""
        self._screen.note(text)

    def close(self) -> None:
        self._screen.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pace:
    """Rates over the last `WINDOW_STEPS` steps; the time left follows from the wall time, so pauses count."""

    def __init__(self, total_steps: int, first_step: int, now: float):
        self.total_steps = total_steps
        self._marks: deque[tuple[int, float]] = deque([(first_step, now)], maxlen=WINDOW_STEPS + 1)
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=WINDOW_STEPS)

    def observe(self, step: int, metrics: Mapping[str, Any], now: float) -> None:
        if step <= self._marks[-1][0]:  # the guard rewound: rates of the steps that were thrown away say nothing
            self._marks.clear()
            self._steps.clear()
        self._marks.append((step, now))
        tokens, wait_s, step_s = (float(metrics.get(name) or 0) for name in ("num_tokens", "data_wait_s", "step_s"))
        self._steps.append((tokens, wait_s, step_s))

    def left_s(self, step: int) -> float | None:
        (old_step, old_time), (new_step, new_time) = self._marks[0], self._marks[-1]
        if new_step <= old_step:
            return None
        return max(self.total_steps - step, 0) * (new_time - old_time) / (new_step - old_step)

    def describe(self, step: int, metrics: Mapping[str, Any]) -> str:
        """`loss 2.3012  31.2k tokens/s  data wait 0.4%  1:23 left`"""
        tokens, wait_s, step_s = (sum(values) for values in zip(*self._steps, strict=True))
        whole_s = step_s + wait_s
        loss, left = metrics.get("loss"), self.left_s(step)
        parts = [f"loss {loss:.4f}" if loss is not None else "loss ?"]
        if whole_s > 0:
            parts += [f"{short(tokens / whole_s)} tokens/s", f"data wait {wait_s / whole_s:.1%}"]
        if left is not None:
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)


@runtime_checkable
class Screen(Protocol):
    """Draws one status text and keeps notes."""

    every_s: float

    def draw(self, step: int, status: str) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class PlainLines:
    """For logs and pipes: one line at a time, flushed."""

    every_s = LINE_EVERY_S

    def __init__(self, stream: Stream):
        self._stream = stream

    def draw(self, step: int, status: str) -> None:
        self.note(f"step {step}  {status}")

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


class RichBar:
    """For a terminal: a bar under the notes."""

    every_s = DRAW_EVERY_S

    def __init__(self, stream: Stream, total_steps: int, first_step: int):
        from rich import progress  # a tenth of a second that a run without a terminal need not spend
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("step {task.completed}/{task.total}"),
            progress.BarColumn(bar_width=10),
            progress.TextColumn("{task.fields[status]}", markup=False),
            console=Console(file=stream),  # type: ignore[arg-type]
            auto_refresh=False,
            redirect_stdout=False,  # stdout belongs to the final JSON object
        )
        self._task = self._bar.add_task("train", total=total_steps, completed=first_step, status="starting")
        self._bar.start()

    def draw(self, step: int, status: str) -> None:
        self._bar.update(self._task, completed=step, status=status, refresh=True)

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def short(number: int | float) -> str:
    """Three significant digits with a unit prefix.

    >>> short(31_234), short(999.6), short(0.5)
    ('31.2k', '1k', '0.5')
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit * 0.9995:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def duration(seconds: int | float) -> str:
    """Hours only when there are some.

    >>> duration(83), duration(3_600)
    ('1:23', '1:00:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
