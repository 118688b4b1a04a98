"""A run directory (format E): run.json, metrics.jsonl, checkpoints/, report.html, faults/; and who may start in it.

Reads `errors`, `config.spec` and `recipes.experiment`; `recipes.train` writes here, `cli` lists. No jax.
Everything that resumes, compares or serves runs reads these files and nothing else.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from jaxml.config.spec import Spec, from_json, leaves, to_json
from jaxml.errors import RunError
from jaxml.recipes.experiment import Experiment

FORMAT = 1
StartMode = Literal["fresh", "resume", "must-resume", "initialise-from"]
ORIGIN_PARTS = ("params", "opt_state", "step")

# Fields of an experiment that a resumed run may change: they alter how it is computed, watched, kept or how long it
# goes on, and no number of the steps already taken.
CHANGEABLE = (
    "name",
    "mesh.",
    "execution.",
    "checkpoint.",
    "guard.",
    "data.prefetch",
    "data.prepared",
    "train.steps",
    "train.eval_every",
    "train.eval_batches",
    "train.eval_batch_size",
    "train.digests",
)


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run."""

    path: Path

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def faults(self) -> Path:
        return self.path / "faults"


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run takes its first state from, and what of it: `params` (the averaged ones, where there are
    some and the optimizer is not taken), `opt_state`, `step` (and with it the schedule and the position in the data)."""

    path: str
    parts: tuple[str, ...] = ("params",)

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "parts": list(self.parts)}

    @classmethod
    def from_json(cls, value: Any) -> Origin | None:
        """None where there is none; a path alone, as runs before it had parts wrote it, means its parameters."""
        if value is None or isinstance(value, str):
            return None if value is None else cls(value)
        return cls(value["path"], tuple(value["parts"]))


@dataclass(frozen=True)
class RunRecord:
    """What run.json holds. `status`: running, finished, interrupted, failed. `lineage`: one entry a process start.

    `initialise_from`: where the run's first state came from, which a run stopped before its first own checkpoint needs
    again.
    """

    id: str
    status: str
    exit_code: int | None
    experiment: dict[str, Any]
    lineage: tuple[dict[str, Any], ...] = ()
    clock_s: tuple[tuple[str, float], ...] = ()
    initialise_from: Origin | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "id": self.id,
            "status": self.status,
            "exit_code": self.exit_code,
            "lineage": list(self.lineage),
            "clock_s": dict(self.clock_s),
            "initialise_from": self.initialise_from and self.initialise_from.to_json(),
            "experiment": self.experiment,
        }

    @classmethod
    def from_json(cls, raw: Any) -> RunRecord:
        """Raises what Python raises for anything but a record."""
        return cls(
            id=raw["id"],
            status=raw["status"],
            exit_code=raw["exit_code"],
            experiment=raw["experiment"],
            lineage=tuple(raw["lineage"]),
            clock_s=tuple((kind, float(seconds)) for kind, seconds in raw["clock_s"].items()),
            initialise_from=Origin.from_json(raw["initialise_from"]),
        )


def read_record(directory: RunDirectory) -> RunRecord | None:
    """The record of a run, or None where there is none. Raises RunError on a damaged one."""
    try:
        return RunRecord.from_json(json.loads(directory.run_json.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as damage:
        raise RunError(
            f"reading {directory.run_json}",
            expected=f"a run record of format {FORMAT}",
            got=f"{type(damage).__name__}: {damage}",
            todo="restore the file, or start a fresh run in another directory with --from this run's checkpoint",
        ) from damage


def require_record(directory: RunDirectory) -> RunRecord:
    """The record of a run. Raises RunError where there is none, or a damaged one."""
    record = read_record(directory)
    if record is None:
        raise RunError(
            f"opening the run {directory.path}",
            expected="a run directory with run.json",
            got="no run.json",
            todo="name the run's directory, or start one with `jaxml train EXPERIMENT --run-dir DIR`",
        )
    return record


def write_record(directory: RunDirectory, record: RunRecord) -> None:
    """Write run.json so that a reader, or a kill, sees the old file or the new one, never a part."""
    write_whole(directory.run_json, json.dumps(record.to_json(), indent=1).encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a kill, sees the old one or the new one, never a part.

    Raises RunError when the disk refuses it (the old file stays).
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as refused:
        raise RunError(
            f"writing {path}",
            expected="a disk that takes it",
            got=f"{type(refused).__name__}: {refused.strerror}",
            todo="free or mend the disk, then resume: what was written before is as it was",
        ) from refused


def open_run(
    directory: RunDirectory,
    experiment: Experiment,
    mode: StartMode,
    has_checkpoint: bool,
    source: str,
    initialise_from: Origin | None,
) -> RunRecord:
    """The record to go on with, checked against the start mode; nothing is written yet.

    `fresh` and `initialise-from` refuse a directory that holds a run; `resume` takes what is there (without a complete
    checkpoint it starts at step 0); `must-resume` refuses to start without a checkpoint.
    Raises RunError when the mode does not fit, or when the experiment changed in a field that decides numbers.
    """
    record = read_record(directory)
    if mode in ("fresh", "initialise-from"):
        if record is not None or directory.checkpoints.exists():
            raise RunError(
                f"starting a {mode} run in {directory.path}",
                expected="a directory without a run",
                got=f"a run with status {record.status!r}" if record else "a checkpoints folder without run.json",
                todo=f"go on with `jaxml resume {directory.path}`, or name another --run-dir",
            )
    elif mode == "must-resume" and not has_checkpoint:
        raise RunError(
            f"resuming {directory.path}",
            expected="a complete checkpoint",
            got="no complete checkpoint" if record else "no run",
            todo="use --start resume to start at step 0 where there is none, or name the right --run-dir",
        )
    if record is not None:
        refuse_changed_experiment(from_json(record.experiment), experiment, f"the run in {directory.path}")
    record = record or RunRecord(uuid.uuid4().hex[:12], "running", None, {})
    entry: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "mode": mode,
        "source": source,
        "pid": os.getpid(),
    }
    if initialise_from is not None:
        entry["initialise_from"] = initialise_from.to_json()
        record = replace(record, initialise_from=initialise_from)
    return replace(
        record, status="running", exit_code=None, experiment=to_json(experiment), lineage=(*record.lineage, entry)
    )


def refuse_changed_experiment(sealed: Spec, wanted: Spec, owner: str) -> None:
    """Raise RunError naming every field, outside CHANGEABLE, in which `wanted` differs from what `owner` was started with."""
    before, after = dict(leaves(sealed)), dict(leaves(wanted))
    changed = [
        f"{path}: {before.get(path)!r} -> {after.get(path)!r}"
        for path in before | after
        if before.get(path) != after.get(path) and not path.startswith(CHANGEABLE) and not path.endswith(".path")
    ]
    if changed:
        raise RunError(
            f"resuming with another experiment than {owner}",
            expected="the same model, task, data, optimizer, precision, batch size and seed",
            got="; ".join(changed),
            todo="undo these changes, or start a new run with --start initialise-from --from CHECKPOINT",
        )


def refuse_url(path: str | Path) -> None:
    """Raise RunError for a URL: a run directory is local, because it is locked, appended to and renamed in."""
    if "://" in str(path):
        raise RunError(
            f"the run directory {path}",
            expected="a local path",
            got="a URL",
            todo="train in a local directory and copy its checkpoints, or mount the store",
        )


class RunLock:
    """An exclusive lock on a run directory for the life of the process (the system frees it on any kind of death)."""

    def __init__(self, directory: RunDirectory):
        self.path = directory.path / "lock"
        self._file: TextIO | None = None

    def __enter__(self) -> RunLock:
        self._file = self.path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as held:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise RunError(
                f"locking {self.path.parent}",
                expected="no other process training in this run directory",
                got=f"process {holder} holds the lock",
                todo="wait for it or stop it; two writers would destroy the run",
            ) from held
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        return self

    def __exit__(self, *unused: object) -> None:
        if self._file is not None:
            self._file.close()
