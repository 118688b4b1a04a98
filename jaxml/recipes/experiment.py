"""The composed experiment, as data, and the checks across its fields. No jax.

Reads the spec file of every stage; `recipes.train` runs one, `cli` overrides its fields, `checkpoint` seals it.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.config.spec import Spec
from jaxml.data.spec import DataSpec
from jaxml.devices.spec import MeshSpec
from jaxml.models.spec import ClassifierSpec, DecoderSpec, ExecutionSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.tasks.spec import LanguageModeling, TextClassification
from jaxml.train.spec import GuardSpec, OptimizerSpec, TrainSpec


@dataclass(frozen=True)
class Experiment(Spec):
    """Everything that decides a run's numbers, and how it is computed, watched and saved."""

    name: str
    model: DecoderSpec | ClassifierSpec
    task: LanguageModeling | TextClassification
    data: DataSpec
    train: TrainSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    mesh: MeshSpec = MeshSpec()
    precision: PrecisionSpec = PrecisionSpec()
    execution: ExecutionSpec = ExecutionSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    guard: GuardSpec = GuardSpec()
