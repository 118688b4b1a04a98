"""Train an experiment in a run directory: start, step, evaluate, save, guard, and leave in order.

Reads `assemble`, `evaluate`, `saving`, `guarding`, `run_directory`, `interruption` and `train.loop`; `cli` and
experiments call `train`. All input and output of a run happens here; the step and the loop stay pure.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxml.checkpoint.store import CheckpointStore, find_checkpoint
from jaxml.config.spec import from_json
from jaxml.devices.start import tune_allocator, use_compilation_cache
from jaxml.errors import JaxmlError, RunError
from jaxml.observe.progress import Stream, Unbreakable
from jaxml.recipes.assemble import assemble, check
from jaxml.recipes.experiment import Experiment
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


class _Left(Exception):
    """A signal came before there was a state to save."""


def train(experiment: Experiment, run_dir: str | Path, options: TrainOptions = TrainOptions()) -> TrainResult:
    """Train to `experiment.train.steps`, in `run_dir`, and return how it ended.

    Raises ConfigError, DataError, DeviceError and RunError before the first step; later CheckpointError when a save
    failed, NonFiniteError and SpikeError when the guard stops the run. The last good checkpoint stays in every case.
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
    directory.path.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        interruption = options.interruption or stack.enter_context(Interruption())
        stack.enter_context(RunLock(directory))
        return _train(experiment, directory, options, clock, interruption)


def resume(
    run_dir: str | Path, change: Callable[[Experiment], Experiment] = lambda e: e, **options: Any
) -> TrainResult:
    """Go on with the run in `run_dir`; `change` may alter what `run_directory.CHANGEABLE` allows.

    Without a complete checkpoint the run starts at step 0 and says so. `options` are fields of TrainOptions.
    """
    record = require_record(RunDirectory(Path(run_dir)))
    experiment = change(from_json(record.experiment))
    return train(experiment, run_dir, replace(TrainOptions(start="resume"), **options))


def _train(
    experiment: Experiment, directory: RunDirectory, options: TrainOptions, clock: WallClock, interruption: Interruption
) -> TrainResult:
    stream = Unbreakable(options.stream or sys.stderr)
    before = read_record(directory)
    with CheckpointStore(str(directory.checkpoints), experiment.checkpoint) as store:
        has_checkpoint = store.latest_step() is not None
        origin = None if options.initialise_from is None else Origin(options.initialise_from, options.parts)
        record = open_run(directory, experiment, options.start, has_checkpoint, options.source, origin)
        check(experiment)
        if options.initialise_from is not None:
            find_checkpoint(options.initialise_from)
        clock.add_previous(dict(record.clock_s))
        write_record(directory, record)
        run: Run | None = None
        status, step, exit_code = "failed", 0, 1
        try:
            try:
                assembly = assemble(experiment, Teller(stream, lambda: _leave_if(interruption.poll())))
            except _Left:
                status, exit_code = "interrupted", REQUEUE_EXIT_CODE
                return TrainResult(str(directory.path), status, 0, exit_code, {}, clock.summary())
            for note in assembly.prepared.notes:
                print(f"jaxml: {note}", file=stream)
            run = Run(assembly, directory, store, Saver(assembly, store, record), clock, interruption, stream)
            status, step = run.to_the_end(options.start, record.initialise_from, options.tensorboard, options.samples)
            exit_code = REQUEUE_EXIT_CODE if status == "interrupted" else 0
            return TrainResult(str(directory.path), status, step, exit_code, dict(run.metrics), clock.summary())
        except JaxmlError as failure:
            exit_code = failure.exit_code
            raise
        finally:
            if run is not None:
                run.close()
            ended = replace(record, status=status, exit_code=exit_code, clock_s=tuple(clock.summary().items()))
            if status == "failed" and (run is None or not run.has_started):
                _undo(directory, before)  # a corrected command finds what this one found
            else:
                _write_last(directory, ended, status, stream)


def _leave_if(is_requested: bool) -> None:
    if is_requested:
        raise _Left


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
