"""Train an experiment in a run directory: start, step, evaluate, save, guard, and leave in order.

Reads `assemble`, `evaluate`, `saving`, `guarding`, `run_directory`, `interruption` and `train.loop`; `cli` and
experiments call `train`. All input and output of a run happens here; the step and the loop stay pure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxml.checkpoint.store import CheckpointStore
from jaxml.config.spec import from_json
from jaxml.data.tokenise import Progress as PrepareProgress
from jaxml.devices.start import tune_allocator, use_compilation_cache
from jaxml.errors import CheckpointError, RunError
from jaxml.observe.progress import Stream
from jaxml.recipes.assemble import assemble
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.interruption import REQUEUE_EXIT_CODE, Interruption
from jaxml.recipes.run_directory import RunDirectory, RunLock, StartMode, open_run, read_record, write_record
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

    `cache_dir`: where compiled programs are kept between processes (None: not kept).
    `owns_process`: the wall-clock account begins at the start of the process, and the allocator is tuned.
    """

    start: StartMode = "fresh"
    initialise_from: str | None = None
    source: str = "python"
    cache_dir: str | None = None
    tensorboard: bool = False
    owns_process: bool = False
    stream: Stream | None = None


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
    directory = RunDirectory(Path(run_dir))
    directory.path.mkdir(parents=True, exist_ok=True)
    with Interruption() as interruption, RunLock(directory):
        return _train(experiment, directory, options, clock, interruption)


def resume(
    run_dir: str | Path, change: Callable[[Experiment], Experiment] = lambda e: e, **options: Any
) -> TrainResult:
    """Go on with the run in `run_dir`; `change` may alter what `run_directory.CHANGEABLE` allows.

    Without a complete checkpoint the run starts at step 0 and says so. `options` are fields of TrainOptions.
    """
    record = read_record(RunDirectory(Path(run_dir)))
    if record is None:
        raise RunError(
            f"resuming {run_dir}",
            expected="a run directory with run.json",
            got="none",
            todo="start one with `jaxml train EXPERIMENT --run-dir DIR`",
        )
    experiment = change(from_json(record.experiment))
    return train(experiment, run_dir, replace(TrainOptions(start="resume"), **options))


def _train(
    experiment: Experiment, directory: RunDirectory, options: TrainOptions, clock: WallClock, interruption: Interruption
) -> TrainResult:
    stream = options.stream or sys.stderr
    store = CheckpointStore(str(directory.checkpoints), experiment.checkpoint)
    record = open_run(directory, experiment, options.start, store.latest_step() is not None, options.source)
    clock.add_previous(dict(record.clock_s))
    write_record(directory, record)
    result: TrainResult | None = None
    try:
        try:
            assembly = assemble(experiment, _prepare_progress(stream, interruption))
        except _Left:
            return (result := _result(directory, "interrupted", 0, {}, clock))
        for note in assembly.prepared.notes:
            print(f"jaxml: {note}", file=stream)
        run = Run(assembly, directory, store, Saver(assembly, store, record), clock, interruption, stream)
        try:
            status, step = run.to_the_end(options.start, options.initialise_from, options.tensorboard)
        finally:
            run.close()
        return (result := _result(directory, status, step, run.metrics, clock))
    finally:
        failure = sys.exc_info()[1]
        if result is None:
            _close_quietly(store, stream)
        status = result.status if result else "failed"
        exit_code = result.exit_code if result else getattr(failure, "exit_code", 1)
        clock_s = tuple(clock.summary().items())
        write_record(directory, replace(record, status=status, exit_code=exit_code, clock_s=clock_s))


def _result(
    directory: RunDirectory, status: str, step: int, metrics: dict[str, float], clock: WallClock
) -> TrainResult:
    exit_code = REQUEUE_EXIT_CODE if status == "interrupted" else 0
    return TrainResult(str(directory.path), status, step, exit_code, dict(metrics), clock.summary())


def _close_quietly(store: CheckpointStore, stream: Stream) -> None:
    """On the way out with another error: a failed save is told, and does not take that error's place."""
    try:
        store.close()
    except CheckpointError as error:
        print(f"jaxml: {error}", file=stream)


def _prepare_progress(stream: Stream, interruption: Interruption) -> Callable[[PrepareProgress], None]:
    """Tells each new stage of a preparation, and leaves when a signal came: the finished shards are kept."""
    told: set[str] = set()

    def show(progress: PrepareProgress) -> None:
        if interruption.poll():
            raise _Left
        if progress.stage not in told or progress.shards:
            told.add(progress.stage)
            counts = f", {progress.documents:,} documents, {progress.tokens:,} tokens" if progress.tokens else ""
            print(f"preparing data: {progress.stage} {progress.name}{counts}", file=stream, flush=True)

    return show
