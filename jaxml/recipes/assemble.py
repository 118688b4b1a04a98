"""From an experiment to what a run needs: checked, devices meshed, data opened, the step built.

Reads `recipes.checks`, `recipes.preparing`, `devices`, `data`, `train.step`; `recipes.train` and `cli` read the `Assembly`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from jaxml.data.batches import EvalBatches, TrainBatches
from jaxml.data.prepared import Prepared
from jaxml.data.tokenise import Progress
from jaxml.devices.mesh import build_mesh
from jaxml.devices.placement import rows_of_process
from jaxml.devices.sharding import batch_sharding
from jaxml.errors import DeviceError
from jaxml.numerics.float8 import require_float8
from jaxml.recipes.checks import check_experiment
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.preparing import prepare_data
from jaxml.train.step import Program, build_program


@dataclass(frozen=True)
class Assembly:
    """One experiment, ready to run on one mesh."""

    experiment: Experiment
    mesh: Mesh
    prepared: Prepared
    program: Program

    def train_batches(self, skipped: tuple[int, ...]) -> TrainBatches:
        """Batches by global step, with the data steps in `skipped` left out; filled where this process's devices need it."""
        size = self.experiment.train.batch_size
        return TrainBatches(self.prepared, size, skipped, filled=rows_of_process(batch_sharding(self.mesh, 1), size))

    def eval_batches(self) -> EvalBatches:
        """The held-out split, each record once; filled where this process's devices need it."""
        size = self.experiment.train.eval_batch_size or self.experiment.train.batch_size
        return EvalBatches(self.prepared, size, filled=rows_of_process(batch_sharding(self.mesh, 1), size))

    def documents_of(self, split: str, batch: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """The places (file and line) of the documents in a batch, without repeats, in order."""
        rows = zip(batch["source"].tolist(), batch["record"].tolist(), strict=True)
        numbers = [n for source, row in rows for n in self.prepared.segments(split, source, row)["document"].tolist()]
        return tuple(self.prepared.describe_document(number).place for number in dict.fromkeys(numbers))


def check(experiment: Experiment) -> Mesh:
    """The mesh of an experiment that nothing is wrong with before its data is opened.

    Raises ConfigError (fields, all at once), DeviceError (mesh), and MissingExtraError for float8 without Qwix.
    """
    if experiment.precision.compute == "float8":
        require_float8()
    mesh = build_mesh(experiment.mesh)
    idle = set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat}
    if idle:
        raise DeviceError(
            "mesh",
            expected=f"devices of each of the {jax.process_count()} processes",
            got=f"{mesh.size} of {jax.device_count()} devices, none of process {', '.join(map(str, sorted(idle)))}",
            todo="set one axis to -1, which takes all devices, or start fewer processes",
        )
    check_experiment(experiment, dict(mesh.shape))
    return mesh


def assemble(experiment: Experiment, tell: Callable[[Progress], None] | None = None) -> Assembly:
    """Build everything but the state; `tell` is called while data is prepared.

    Raises what `check` raises, and DataError (sources, tokenizer, prepared directory).
    """
    mesh = check(experiment)
    prepared = prepare_data(experiment, tell)
    program = build_program(
        experiment.model,
        experiment.task,
        experiment.optimizer,
        experiment.train,
        mesh,
        experiment.precision,
        experiment.execution,
    )
    return Assembly(experiment, mesh, prepared, program)
