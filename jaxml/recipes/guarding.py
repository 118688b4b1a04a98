"""What a run does about a bad step: names it, saves its batch, then stops, skips or rewinds as configured.

Reads `train.guard` (the pure decisions) and the assembled run; `recipes.train` asks `judge` after each step. What was
done is kept in `faults/events.json`, so that a run killed right after a rewind still knows which steps it left out.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxml.errors import NonFiniteError, RunError, SpikeError
from jaxml.recipes.assemble import Assembly
from jaxml.recipes.run_directory import write_whole
from jaxml.train.guard import SpikeDetector, diagnose, endless_overflow
from jaxml.train.loop import StepEvent

EVENTS_FILE = "events.json"


@dataclass(frozen=True)
class GuardEvent:
    """One bad step and what was done. `data_step`: the step of the data order whose batch it was."""

    step: int
    data_step: int
    action: Literal["stop", "skip", "rewind"]
    reason: str
    documents: tuple[str, ...]
    batch_file: str

    def __str__(self) -> str:
        shown = ", ".join(self.documents[:8]) + (
            f" and {len(self.documents) - 8} more" if len(self.documents) > 8 else ""
        )
        done = {
            "stop": "stopped",
            "skip": "left the update out",
            "rewind": f"went back and leaves out data step {self.data_step}",
        }[self.action]
        return f"step {self.step}: {self.reason}; {done}. Documents: {shown}. Batch: {self.batch_file}"


class Guard:
    """Watches the steps of one run. Of several processes every one decides, and one `writes` what was done."""

    def __init__(self, assembly: Assembly, faults_dir: Path, writes: bool = True):
        self.assembly, self.faults_dir, self.writes = assembly, faults_dir, writes
        self.spec = assembly.experiment.guard
        self.detector = SpikeDetector(self.spec)
        self.events = read_events(faults_dir)

    def restore(self, records: list[dict[str, Any]]) -> None:
        """Feed the losses of the steps that are behind the run, so that a resumed run decides as the straight one."""
        good = [record["loss"] for record in records if record.get("is_finite") and record.get("loss") is not None]
        # Only good losses are logged between rewinds, so the window is the newest of them.
        self.detector = SpikeDetector(self.spec, good[-self.spec.spike_window :])

    def judge(self, event: StepEvent, skipped: tuple[int, ...]) -> GuardEvent | None:
        """None to go on, or the event of a rewind that the caller has to carry out.

        Raises NonFiniteError or SpikeError when the run has to stop; the state that was saved last is good. A float16
        step that overflowed is no fault: it left its update out and lowered the loss scale. Only when that does not help
        the run stops, whatever `on_nonfinite` says.
        """
        is_overflow = event.metrics.get("is_overflow", False)
        if is_overflow:
            why = endless_overflow(event.metrics, self.assembly.experiment.precision.loss_scale, self.spec.max_skips)
            if not why:
                return None
            reason, action = f"{why}; {self._diagnosis(event)}", "stop"
        elif not event.metrics["is_finite"]:
            reason, action = self._diagnosis(event), self.spec.on_nonfinite
        else:
            loss = event.metrics["loss"]
            deviations = self.detector.deviations(loss)
            if not self.detector.observe(loss):
                return None
            reason = (
                f"loss {loss:.4g} is {deviations:.1f} robust standard deviations above the median of the last steps"
            )
            action = "rewind"
        if action == "rewind" and sum(past.action == "rewind" for past in self.events) >= self.spec.max_rewinds:
            reason += f"; all {self.spec.max_rewinds} rewinds are used up"
            action = "stop"
        if action == "skip" and self._skips_before(event.step) >= self.spec.max_skips:
            reason += f"; {self.spec.max_skips} updates in a row were skipped already"
            action = "stop"
        verdict = self._record(event, skipped, action, reason)
        if action == "skip":
            return None
        if action == "rewind":
            return verdict
        error = SpikeError if event.metrics["is_finite"] else NonFiniteError
        todo = "lower the learning rate, or set --guard.on-nonfinite skip (or rewind)"
        if is_overflow:
            todo = "take --precision.compute bfloat16 or float32, which have the range, or lower the learning rate"
        raise error(
            f"training step {event.step}",
            expected="a finite loss near the recent ones, and finite gradients",
            got=reason,
            todo=f"look at {verdict.batch_file}; {todo}",
        )

    def _diagnosis(self, event: StepEvent) -> str:
        return str(diagnose(self.assembly.program, event.suspect_params, event.batch, event.metrics))

    def _record(self, event: StepEvent, skipped: tuple[int, ...], action: Any, reason: str) -> GuardEvent:
        """Save the batch and append the event; both are on disk before anything is done about it."""
        data_step = self.assembly.train_batches(skipped).order.data_step(event.step - 1)
        batch_file = self.faults_dir / f"step_{event.step}_data_{data_step}.npz"
        columns: dict[str, Any] = dict(event.batch)
        content = io.BytesIO()
        np.savez(content, **columns)
        if self.writes:
            write_whole(batch_file, content.getvalue())
        documents = self.assembly.documents_of("train", event.batch)
        verdict = GuardEvent(event.step, data_step, action, reason, documents, str(batch_file))
        # A resumed run may meet the same bad step again: it is one event.
        again = (verdict.step, verdict.data_step, verdict.action)
        self.events = [past for past in self.events if (past.step, past.data_step, past.action) != again] + [verdict]
        if self.writes:
            events = json.dumps([asdict(past) for past in self.events], indent=1)
            write_whole(self.faults_dir / EVENTS_FILE, events.encode())
        return verdict

    def _skips_before(self, step: int) -> int:
        """How many updates in a row were skipped right before `step`."""
        skipped = {event.step for event in self.events if event.action == "skip"}
        return next(count for count in range(step + 1) if step - 1 - count not in skipped)


def read_events(faults_dir: Path) -> list[GuardEvent]:
    """What the guard of a run did so far. Raises RunError when the file is damaged."""
    log = faults_dir / EVENTS_FILE
    try:
        raw: list[dict[str, Any]] = json.loads(log.read_text()) if log.exists() else []
    except ValueError as damage:
        raise RunError(
            f"reading {log}",
            expected="a JSON list of guard events",
            got=str(damage),
            todo="restore it: it says which data steps the run leaves out",
        ) from damage
    return [GuardEvent(**fields | {"documents": tuple(fields["documents"])}) for fields in raw]


def left_out(events: list[GuardEvent]) -> tuple[int, ...]:
    """The data steps that rewinds left out."""
    return tuple(sorted({event.data_step for event in events if event.action == "rewind"}))
