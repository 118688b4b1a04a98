"""The state of a run at any step that it took: restored from the checkpoint before it and stepped forward, bit for bit.

Reads `recipes` (the run directory, the assembled experiment, what was sealed); `prove.diverge` and `prove.blame` go back
with it. Nothing is written into the run's directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxml.checkpoint.store import CheckpointStore
from jaxml.config.spec import from_json
from jaxml.data.batches import TrainBatches
from jaxml.errors import RunError
from jaxml.observe.metrics_log import Record, read_metrics
from jaxml.recipes.assemble import Assembly, assemble
from jaxml.recipes.run_directory import RunDirectory, RunRecord, require_record
from jaxml.recipes.saving import Saver, take_parts
from jaxml.recipes.seen import skipped_steps

Tell = Callable[[str], None]


@dataclass(frozen=True)
class PastRun:
    """A run that was trained: its records by step, its experiment assembled on the devices at hand, and its batches (number
    N - 1 is that of step N)."""

    directory: RunDirectory
    record: RunRecord
    assembly: Assembly
    records: dict[int, Record]
    batches: TrainBatches


@dataclass(frozen=True)
class Place:
    """Where a state comes from: `step` updates were done; `checkpoint` is the saved step that it was restored from (None:
    the run's first state); `num_replayed` updates were taken again from there."""

    step: int
    checkpoint: int | None
    num_replayed: int

    def __str__(self) -> str:
        origin = "the run's first state" if self.checkpoint is None else f"the checkpoint of step {self.checkpoint}"
        plural = "s" if self.num_replayed > 1 else ""
        again = f", {self.num_replayed} step{plural} taken again" if self.num_replayed else ""
        return f"step {self.step} ({origin}{again})"


def open_past_run(run_dir: str) -> PastRun:
    """Open a run to go back in it.

    Raises RunError where there is no run or it logged no step, and what `recipes.assemble` raises: the devices have to
    take the experiment's mesh, and its prepared data has to be there.
    """
    directory = RunDirectory(Path(run_dir))
    record = require_record(directory)
    records = {line["step"]: line for line in read_metrics(directory.metrics)}
    if not records:
        raise RunError(
            f"the run {run_dir}",
            expected="a run that has taken a step",
            got="an empty metrics.jsonl",
            todo="name the directory of another run",
        )
    experiment = from_json(record.experiment)
    if "float64" in (experiment.precision.params, experiment.precision.compute):
        jax.config.update("jax_enable_x64", True)
    assembly = assemble(experiment)
    return PastRun(directory, record, assembly, records, assembly.train_batches(skipped_steps(directory)))


def require_step(run: PastRun, step: int) -> None:
    """Raise RunError for a step that the run did not log."""
    if step not in run.records:
        raise RunError(
            f"step {step} of {run.directory.path}",
            expected=f"a step that the run took, from {min(run.records)} to {max(run.records)}",
            got=str(step),
            todo="choose one of these",
        )


def state_at(run: PastRun, step: int, most_replayed: int | None = None) -> tuple[dict[str, Any], Place]:
    """(the state after `step` updates, where it comes from), on the run's mesh.

    It starts from the newest complete checkpoint at or before `step`, or from the run's first state. Where more than
    `most_replayed` steps (None: any number) would have to be taken again it stays there. The bits are those of the run on
    the same kind and number of devices. Raises CheckpointError for a checkpoint that cannot be used.
    """
    store_spec = run.assembly.experiment.checkpoint
    with CheckpointStore(str(run.directory.checkpoints), store_spec) as store:
        saved = max((found for found in store.steps() if found <= step), default=None)
        if saved is not None:
            state, _ = Saver(run.assembly, store, run.record).restore(saved)
        else:
            state = first_state(run)
    begun = int(state["step"])
    if begun > step:
        raise RunError(
            f"step {step} of {run.directory.path}",
            expected=f"a step after {begun}, with which the run began",
            got=str(step),
            todo=f"choose step {begun + 1} or a later one",
        )
    if most_replayed is not None and step - begun > most_replayed:
        return state, Place(begun, saved, 0)
    for number in range(begun, step):
        state, _ = run.assembly.program.train_step(state, run.batches.batch(number))
    return state, Place(step, saved, step - begun)


def first_state(run: PastRun) -> dict[str, Any]:
    """The state that the run began with: drawn from its seed, or with the parts of another checkpoint."""
    state = run.assembly.program.init(run.assembly.experiment.train.seed)
    if run.record.initialise_from is not None:
        state, _ = take_parts(run.assembly, state, run.record.initialise_from)
    return state
