"""From an experiment to what a run needs: checked, devices meshed, data opened, the step built.

Reads `recipes.checks`, `devices`, `data`, `train.step`; `recipes.train` and `cli` read the `Assembly`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from jaxml.data.batches import EvalBatches, TrainBatches
from jaxml.data.layout import DATASET_FILE
from jaxml.data.prepare import prepare
from jaxml.data.prepared import Prepared, open_prepared
from jaxml.data.tokenise import Progress
from jaxml.devices.mesh import build_mesh
from jaxml.models.check import decoder_of
from jaxml.recipes.checks import check_experiment
from jaxml.recipes.experiment import Experiment
from jaxml.tasks.spec import TextClassification
from jaxml.train.step import Program, build_program


@dataclass(frozen=True)
class Assembly:
    """One experiment, ready to run on one mesh."""

    experiment: Experiment
    mesh: Mesh
    prepared: Prepared
    program: Program

    def train_batches(self, skipped: tuple[int, ...]) -> TrainBatches:
        """Batches by global step, with the data steps in `skipped` left out."""
        return TrainBatches(self.prepared, self.experiment.train.batch_size, skipped)

    def eval_batches(self) -> EvalBatches:
        """The held-out split, each record once."""
        train = self.experiment.train
        return EvalBatches(self.prepared, train.eval_batch_size or train.batch_size)

    def documents_of(self, split: str, batch: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """The places (file and line) of the documents in a batch, without repeats, in order."""
        rows = zip(batch["source"].tolist(), batch["record"].tolist(), strict=True)
        numbers = [n for source, row in rows for n in self.prepared.segments(split, source, row)["document"].tolist()]
        return tuple(self.prepared.describe_document(number).place for number in dict.fromkeys(numbers))


def assemble(experiment: Experiment, progress: Callable[[Progress], None] | None = None) -> Assembly:
    """Build everything but the state; `progress` is called while data is prepared.

    Raises ConfigError (fields), DeviceError (mesh), DataError (sources, tokenizer, prepared directory).
    """
    mesh = build_mesh(experiment.mesh)
    check_experiment(experiment, num_devices=mesh.size)
    prepared = prepare_data(experiment, progress)
    program = build_program(
        experiment.model,
        experiment.task,
        experiment.optimizer,
        experiment.train,
        experiment.guard,
        mesh,
        experiment.precision,
        experiment.execution,
    )
    return Assembly(experiment, mesh, prepared, program)


def prepare_data(experiment: Experiment, progress: Callable[[Progress], None] | None = None) -> Prepared:
    """Open the prepared directory, or prepare it where there is none yet. A stale one is refused, not overwritten."""
    if (Path(experiment.data.prepared) / DATASET_FILE).exists():
        return open_prepared(experiment.data, decoder_of(experiment.model).vocab_size, labels_of(experiment))
    return prepare_again(experiment, progress)


def prepare_again(
    experiment: Experiment, progress: Callable[[Progress], None] | None = None, force: bool = False
) -> Prepared:
    """Prepare what is not prepared yet; with `force` also over a directory that holds other data."""
    vocab_size = decoder_of(experiment.model).vocab_size
    labels = labels_of(experiment)
    return prepare(experiment.data, has_labels=labels, vocab_size=vocab_size, progress=progress, force=force)


def labels_of(experiment: Experiment) -> tuple[str, ...]:
    """The class names of a classification task; empty for any other."""
    return experiment.task.labels if isinstance(experiment.task, TextClassification) else ()
