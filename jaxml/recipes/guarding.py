"""What a run does about a bad step: names it, saves its batch, then stops, skips or rewinds as configured.

Reads `train.guard` (the pure decisions) and the assembled run; `recipes.train` asks `judge` after each step. What was
done is kept in `faults/events.jsonl`, so that a run killed right after a rewind still knows which steps it left out.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxml.errors import NonFiniteError, SpikeError
from jaxml.recipes.assemble import Assembly
from jaxml.train.guard import SpikeDetector, diagnose
from jaxml.train.loop import StepEvent

EVENTS_FILE = "events.jsonl"


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
    """Watches the steps of one run."""

    def __init__(self, assembly: Assembly, faults_dir: Path):
        self.assembly, self.faults_dir = assembly, faults_dir
        self.spec = assembly.experiment.guard
        self.detector = SpikeDetector(self.spec)
        self.events = read_events(faults_dir)

    def restore(self, records: list[dict[str, Any]]) -> None:
        """Feed the losses of the steps that are behind the run, so that a resumed run decides as the straight one."""
        self.detector = SpikeDetector(self.spec, [r["loss"] for r in records if r.get("loss") is not None])

    def judge(self, event: StepEvent, skipped: tuple[int, ...]) -> GuardEvent | None:
        """None to go on, or the event of a rewind that the caller has to carry out.

        Raises NonFiniteError or SpikeError when the run has to stop; the state that was saved last is good.
        """
        if not event.metrics["is_finite"]:
            reason = str(diagnose(self.assembly.program, event.suspect_params, event.batch, event.metrics))
            action = self.spec.on_nonfinite
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
        verdict = self._record(event, skipped, action, reason)
        if action == "skip":
            return None
        if action == "rewind":
            return verdict
        error = SpikeError if event.metrics["is_finite"] else NonFiniteError
        raise error(
            f"training step {event.step}",
            expected="a finite loss near the recent ones, and finite gradients",
            got=reason,
            todo=f"look at {verdict.batch_file}; lower the learning rate, or set --guard.on-nonfinite skip (or rewind)",
        )

    def _record(self, event: StepEvent, skipped: tuple[int, ...], action: Any, reason: str) -> GuardEvent:
        """Save the batch and append the event; both are on disk before anything is done about it."""
        self.faults_dir.mkdir(parents=True, exist_ok=True)
        batch_file = self.faults_dir / f"step_{event.step}.npz"
        columns: dict[str, Any] = dict(event.batch)
        np.savez(batch_file, **columns)
        data_step = self.assembly.train_batches(skipped).order.data_step(event.step - 1)
        documents = self.assembly.documents_of("train", event.batch)
        verdict = GuardEvent(event.step, data_step, action, reason, documents, str(batch_file))
        with (self.faults_dir / EVENTS_FILE).open("a") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.events.append(verdict)
        return verdict


def read_events(faults_dir: Path) -> list[GuardEvent]:
    """What the guard of a run did so far. A line that a kill tore is left out: its verdict was not carried out."""
    log = faults_dir / EVENTS_FILE
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    raw: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [GuardEvent(**fields | {"documents": tuple(fields["documents"])}) for fields in raw]


def left_out(events: list[GuardEvent]) -> tuple[int, ...]:
    """The data steps that rewinds left out."""
    return tuple(sorted({event.data_step for event in events if event.action == "rewind"}))
