"""Which training steps, and which checkpoints, saw a document: format C inverted.

Reads `data.order` (through the assembled batches), `run_directory`, `checkpoint.folders` and `guarding`; `cli.seen` prints
it. The order of data is arithmetic, so nothing had to be logged to answer this.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxml.checkpoint.folders import damage, read_manifest, resolve, step_folders
from jaxml.checkpoint.manifest import Manifest
from jaxml.config.spec import from_json
from jaxml.data.batches import TrainBatches
from jaxml.data.prepared import Prepared
from jaxml.observe.metrics_log import read_metrics
from jaxml.recipes.guarding import left_out, read_events
from jaxml.recipes.preparing import prepare_data
from jaxml.recipes.run_directory import RunDirectory, require_record
from jaxml.recipes.saving import refuse_other_data


@dataclass(frozen=True)
class Seen:
    """`steps` count from 1, as in metrics.jsonl; `checkpoints` are the complete ones at or after the first of them."""

    document: int
    place: str
    split: str
    num_tokens: int
    steps: list[int]
    checkpoints: list[int]
    last_step: int


def open_run_data(run_dir: str) -> tuple[RunDirectory, Prepared, int]:
    """(directory, its prepared data, batch size) of a run. Raises RunError where there is no run."""
    directory = RunDirectory(Path(run_dir))
    record = require_record(directory)
    experiment = from_json(record.experiment)
    return directory, prepare_data(experiment), experiment.train.batch_size


def complete_manifests(directory: RunDirectory) -> dict[int, Manifest]:
    """The manifests of a run's complete checkpoints, by step."""
    store = resolve(str(directory.checkpoints))
    return {step: read_manifest(store, step) for step in step_folders(store) if not damage(store, step)}


def skipped_steps(directory: RunDirectory) -> tuple[int, ...]:
    """The data steps that a run left out, as its checkpoints and its guard know them."""
    sealed = {step for manifest in complete_manifests(directory).values() for step in manifest.skipped_steps}
    return tuple(sorted(sealed | set(left_out(read_events(directory.faults)))))


def seen_by(directory: RunDirectory, prepared: Prepared, batch_size: int, document: int) -> Seen:
    """The steps of a run, up to its last logged one, whose batch held a piece of `document` (its number in the data).

    Raises DataError when there is no such document, CheckpointError when the run trained on other data than `prepared`.
    """
    info = prepared.describe_document(document)
    records = read_metrics(directory.metrics) if directory.metrics.exists() else []
    last_step = records[-1]["step"] if records else 0
    complete = complete_manifests(directory)
    for manifest in complete.values():
        refuse_other_data(manifest, prepared, f"the checkpoint of step {manifest.step} in {directory.path}")
    order = TrainBatches(prepared, batch_size, skipped_steps(directory)).order
    rows = [(source, row) for split, source, row in prepared.rows_of_document(document) if split == "train"]
    steps = sorted({step + 1 for source, row in rows for step in order.steps_of(source, row, 0, last_step, batch_size)})
    checkpoints = [step for step in complete if steps and step >= steps[0]]
    return Seen(document, info.place, info.split, info.num_tokens, steps, checkpoints, last_step)
