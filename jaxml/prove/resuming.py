"""Claim 3, the first part: a run that is killed and resumed several times equals the straight run, bit for bit.

Reads `recipes.train`, `checkpoint.compare` and `prove.subject`; `prove.prove` runs it, and the checkpoint of the straight run
serves the claims that come after it. A kill is an exception out of the loop: nothing is saved on the way out.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from jaxml.checkpoint.compare import compare
from jaxml.observe.metrics_log import read_metrics
from jaxml.observe.progress import Stream
from jaxml.prove.claims import Claim, Parting, Picture, exact
from jaxml.prove.parting import MAKERS
from jaxml.prove.subject import Subject
from jaxml.recipes.interruption import Interruption
from jaxml.recipes.run_directory import RunDirectory
from jaxml.recipes.train import TrainOptions, resume, train

GROUP = "resume equals the straight run"
KILLED_AFTER = (2, 6, 13)  # steps in the log: before the first checkpoint, between two, and beyond the first epoch
PARTS = ("opt_state", "params", "ema", "loss_scale")  # in the order in which a step makes them


class Killed(BaseException):
    """A process that is gone: no handler of errors takes it."""


class Kill(Interruption):
    """An interruption that nobody announced: the run ends in the middle of things once its log has `step` steps."""

    def __init__(self, log: Path, step: int):
        super().__init__()
        self.log, self.step = log, step

    def poll(self) -> bool:
        if self.log.exists() and len(read_metrics(self.log)) >= self.step:
            raise Killed
        return False


@dataclass(frozen=True)
class Runs:
    """The straight run and the one that was killed."""

    straight: RunDirectory
    killed: RunDirectory


def straight_run(subject: Subject, stream: Stream, cache_dir: str | None) -> RunDirectory:
    """The experiment from its first step to its last, by the recipe; the claims on checkpoints use it too."""
    directory = RunDirectory(subject.directory / "straight")
    if not directory.run_json.exists():
        train(subject.experiment, directory.path, TrainOptions(stream=stream, cache_dir=cache_dir))
    return directory


def killed_run(subject: Subject, stream: Stream, cache_dir: str | None) -> RunDirectory:
    """The same, killed KILLED_AFTER steps and resumed each time."""
    directory = RunDirectory(subject.directory / "killed")
    for number, step in enumerate(KILLED_AFTER):
        options = {"stream": stream, "cache_dir": cache_dir, "interruption": Kill(directory.metrics, step)}
        with contextlib.suppress(Killed):
            if number == 0:
                train(subject.experiment, directory.path, TrainOptions(**options))
            else:
                resume(directory.path, **options)
    resume(directory.path, stream=stream, cache_dir=cache_dir)
    return directory


def resumed(subject: Subject, stream: Stream, cache_dir: str | None = None) -> Claim:
    """Losses of all steps, held-out metrics and every bit of the last checkpoint."""
    runs = Runs(straight_run(subject, stream, cache_dir), killed_run(subject, stream, cache_dir))
    logs = [read_metrics(run.metrics) for run in (runs.straight, runs.killed)]
    faults = []
    for left, right in zip(*logs, strict=False):
        names = [name for name in left if name in ("step", "loss", "grad_norm") or name.startswith("eval_")]
        faults += [
            f"step {left['step']}: {name} {left[name]} and {right.get(name)}"
            for name in names
            if left[name] != right.get(name)
        ]
    if len(logs[0]) != len(logs[1]):
        faults.append(f"{len(logs[0])} and {len(logs[1])} steps in the logs")
    last = compare(runs.straight.path, runs.killed.path)
    faults += [f"{part}: {difference}" for part in PARTS for difference in last.leaves.get(part, [])]
    claim = exact(GROUP, f"{len(KILLED_AFTER)} kills", faults, _detail(subject, logs[0]))
    parting = _parting(runs) if faults else None
    picture = Picture(
        "Losses", "loss, nats", (("straight", _points(logs[0])), ("killed and resumed", _points(logs[1])))
    )
    return Claim(GROUP, claim.name, claim.error, 0.0, claim.detail, parting=parting, pictures=(picture,))


def _detail(subject: Subject, log: list[dict[str, float]]) -> str:
    rows = sum(subject.prepared.num_rows("train"))
    epochs = subject.experiment.train.steps * subject.experiment.train.batch_size / max(rows, 1)
    return (
        f"killed after steps {', '.join(map(str, KILLED_AFTER))} of {len(log)}, {epochs:.1f} epochs; all bits are equal"
    )


def _points(log: list[dict[str, float]]) -> tuple[tuple[float, float | None], ...]:
    return tuple((float(record["step"]), record.get("loss")) for record in log)


def _parting(runs: Runs) -> Parting | None:
    """The first leaf that differs in the first checkpoint, of those that both runs have, that does."""
    folders = [
        {int(name) for name in os.listdir(run.checkpoints) if name.isdigit()} for run in (runs.straight, runs.killed)
    ]
    for step in sorted(folders[0] & folders[1]):
        found = compare(runs.straight.checkpoints / str(step), runs.killed.checkpoints / str(step))
        for part in PARTS:
            for difference in found.leaves.get(part, []):
                error = float("inf") if difference.max_abs_difference is None else difference.max_abs_difference
                return Parting(
                    f"{part} of {difference.path}, checkpoint of step {step}", MAKERS.get(part, "the step"), error
                )
    return None
