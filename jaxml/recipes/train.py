"""Train an experiment in a run directory: start, step, evaluate, save, guard, and leave in order.

Reads `assemble`, `running`, `saving`, `fingerprint`, `run_directory`, `interruption` and `devices.start`; `cli` and
experiments call `train`. All input and output of a run happens here; the step and the loop stay pure.

Several processes run this same program. The first one alone locks and writes the run directory, which all can read, and
what it finds there all are told; every process computes, saves its part and restores it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxml.checkpoint.store import CheckpointStore, find_checkpoint
from jaxml.config.spec import from_json
from jaxml.devices.membership import Membership
from jaxml.devices.processes import AskedToLeave, Processes
from jaxml.devices.start import joined, tune_allocator, use_compilation_cache
from jaxml.errors import DeviceError, JaxmlError, RunError
from jaxml.numerics.spec import resolved
from jaxml.observe.progress import Stream, Unbreakable
from jaxml.recipes.assemble import Assembly, assemble, check
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.fingerprint import data_facts, run_facts
from jaxml.recipes.interruption import REQUEUE_EXIT_CODE, Interruption
from jaxml.recipes.preparing import Teller
from jaxml.recipes.run_directory import (
    Origin,
    RunDirectory,
    RunLock,
    RunRecord,
    StartMode,
    open_run,
    read_record,
    refuse_url,
    require_record,
    write_record,
)
from jaxml.recipes.running import Run
from jaxml.recipes.saving import Saver
from jaxml.telemetry import WallClock


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. `status` is finished or interrupted; `metrics` are those of the last step and evaluation."""

    run_dir: str
    status: str
    step: int
    exit_code: int
    metrics: dict[str, float]
    clock_s: dict[str, float]


@dataclass(frozen=True)
class TrainOptions:
    """How to start and what to show; nothing here changes the numbers of a run.

    `parts`: what is taken from `initialise_from` (see `run_directory.Origin`).
    `cache_dir`: where compiled programs are kept between processes (None: not kept).
    `owns_process`: the wall-clock account begins at the start of the process, and the allocator is tuned.
    `samples`: prompts that the trained model answers in report.html.
    `interruption`: one that already listens, so that a signal during the imports is heard.
    `membership`: which of several processes this is (None: the only one); they share the run directory.
    """

    start: StartMode = "fresh"
    initialise_from: str | None = None
    parts: tuple[str, ...] = ("params",)
    source: str = "python"
    cache_dir: str | None = None
    tensorboard: bool = False
    samples: tuple[str, ...] = ()
    owns_process: bool = False
    stream: Stream | None = None
    interruption: Interruption | None = None
    membership: Membership | None = None


def train(experiment: Experiment, run_dir: str | Path, options: TrainOptions = TrainOptions()) -> TrainResult:
    """Train to `experiment.train.steps`, in `run_dir`, and return how it ended.

    Of several processes every one gets the result. Raises ConfigError, DataError, DeviceError and RunError before the
    first step; later CheckpointError when a save failed, NonFiniteError and SpikeError when the guard stops the run. The
    last good checkpoint stays in every case.
    """
    clock = WallClock() if options.owns_process else WallClock(age_s=0.0)
    clock.mark_imported()
    if options.owns_process:
        tune_allocator()
    if options.cache_dir:
        use_compilation_cache(options.cache_dir)
    if "float64" in (experiment.precision.params, experiment.precision.compute):
        jax.config.update("jax_enable_x64", True)
    refuse_url(run_dir)
    directory = RunDirectory(Path(run_dir))
    with contextlib.ExitStack() as stack:
        interruption = options.interruption or stack.enter_context(Interruption())
        try:
            processes = stack.enter_context(joined(options.membership, interruption.poll))
            # From here on records say what "auto" meant, and a resumed run computes in it on any backend.
            experiment = replace(experiment, precision=resolved(experiment.precision, jax.default_backend()))
            return _Start(experiment, directory, options, clock, processes, stack).train()
        except AskedToLeave as left:
            return TrainResult(str(directory.path), "interrupted", 0, left.exit_code, {}, clock.summary())


def resume(
    run_dir: str | Path, change: Callable[[Experiment], Experiment] = lambda e: e, **options: Any
) -> TrainResult:
    """Go on with the run in `run_dir`; `change` may alter what `run_directory.CHANGEABLE` allows.

    Without a complete checkpoint the run starts at step 0 and says so. `options` are fields of TrainOptions.
    """
    record = require_record(RunDirectory(Path(run_dir)))
    experiment = change(from_json(record.experiment))
    return train(experiment, run_dir, replace(TrainOptions(start="resume"), **options))


@dataclass(frozen=True)
class _Start:
    """What a run begins with. `stack` is closed when it ends: it holds the lock of the run directory."""

    experiment: Experiment
    directory: RunDirectory
    options: TrainOptions
    clock: WallClock
    processes: Processes
    stack: contextlib.ExitStack

    def train(self) -> TrainResult:
        """Open the run, train, and leave its record as it ended."""
        experiment, directory, processes = self.experiment, self.directory, self.processes
        stream = Unbreakable((self.options.stream or sys.stderr) if processes.is_first else self._silence())
        processes.all_same("experiment", run_facts(experiment, self.options.start))
        store = CheckpointStore(str(directory.checkpoints), experiment.checkpoint)
        # The others hear of a failure before the store is closed, which may wait for them.
        with store, processes.failing_together():
            opened = processes.from_first(lambda: self._open(store))
            before = None if opened["before"] is None else RunRecord.from_json(opened["before"])
            record = RunRecord.from_json(opened["record"])
            check(experiment)
            self.clock.add_previous(dict(record.clock_s))
            self._write(record)
            run: Run | None = None
            status, step, exit_code = "failed", 0, 1
            try:
                assembly = self._assemble(stream)
                if assembly is None:
                    status, exit_code = "interrupted", REQUEUE_EXIT_CODE
                    return TrainResult(str(directory.path), status, 0, exit_code, {}, self.clock.summary())
                for note in assembly.prepared.notes:
                    print(f"jaxml: {note}", file=stream)
                run = Run(assembly, directory, store, Saver(assembly, store, record), self.clock, processes, stream)
                status, step = run.to_the_end(
                    self.options.start, record.initialise_from, self.options.tensorboard, self.options.samples
                )
                exit_code = REQUEUE_EXIT_CODE if status == "interrupted" else 0
                return TrainResult(
                    str(directory.path), status, step, exit_code, dict(run.metrics), self.clock.summary()
                )
            except JaxmlError as failure:
                exit_code = failure.exit_code
                raise
            except jax.errors.JaxRuntimeError as broken:
                if processes.count == 1:
                    raise
                raise _broken_off(broken, processes) from broken
            finally:
                if run is not None:
                    run.close()
                ended = replace(record, status=status, exit_code=exit_code, clock_s=tuple(self.clock.summary().items()))
                if not processes.is_first:
                    pass  # the first process writes the record
                elif status == "failed" and (run is None or not run.has_started):
                    _undo(directory, before)  # a corrected command finds what this one found
                else:
                    _write_last(directory, ended, status, stream)

    def _silence(self) -> Stream:
        return self.stack.enter_context(open(os.devnull, "w"))

    def _open(self, store: CheckpointStore) -> dict[str, Any]:
        """In the first process: lock the run directory; the record that was there, if any, and the one to go on with."""
        self.directory.path.mkdir(parents=True, exist_ok=True)
        self.stack.enter_context(RunLock(self.directory))
        before = read_record(self.directory)
        options, has_checkpoint = self.options, store.latest_step() is not None
        origin = None if options.initialise_from is None else Origin(options.initialise_from, options.parts)
        record = open_run(self.directory, self.experiment, options.start, has_checkpoint, options.source, origin)
        if options.initialise_from is not None:
            find_checkpoint(options.initialise_from)
        return {"before": None if before is None else before.to_json(), "record": record.to_json()}

    def _write(self, record: RunRecord) -> None:
        self.processes.from_first(lambda: write_record(self.directory, record))

    def _assemble(self, stream: Stream) -> Assembly | None:
        """None when a signal to one of the processes came before all had their data; then all leave."""

        def leave_if_asked() -> None:
            if self.processes.is_asked_to_leave():
                raise AskedToLeave

        assembly = None
        with contextlib.suppress(AskedToLeave):
            assembly = assemble(self.experiment, Teller(stream, leave_if_asked))
        facts = None if assembly is None else data_facts(assembly.prepared)
        return assembly if self.processes.all_same("data", facts) else None


def _broken_off(broken: jax.errors.JaxRuntimeError, processes: Processes) -> DeviceError:
    return DeviceError(
        f"computing together with {processes.count - 1} other processes, in process {processes.index}",
        expected="all of them to take part in every step",
        got=str(broken)[:400],
        todo="see which process ended first, and why; then resume: the last checkpoint is complete",
    )


def _undo(directory: RunDirectory, before: RunRecord | None) -> None:
    """A start that failed before its first step leaves no record of itself."""
    if before is not None:
        write_record(directory, before)
    else:
        directory.run_json.unlink(missing_ok=True)


def _write_last(directory: RunDirectory, record: RunRecord, status: str, stream: Stream) -> None:
    """The record at the end. When the run failed already, the disk's refusal is told and does not hide that failure."""
    try:
        write_record(directory, record)
    except RunError as refused:
        if status != "failed":
            raise
        print(f"jaxml: {refused}", file=stream)
