"""What a checkpoint says of a model that was not trained here, as data. No jax.

Reads the spec files of models, tasks and numerics; `recipes.importing` seals it where a trained checkpoint has its
Experiment, under the same field names, so that whatever opens a checkpoint by its parts opens both.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxml.config.spec import Spec
from jaxml.models.spec import DecoderSpec, ExecutionSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.tasks.spec import LanguageModeling


@dataclass(frozen=True)
class ImportedModel(Spec):
    """A published language model. `source`: the name of the directory it came from, without its place on that machine;
    `family`: which file of `models.families` read it."""

    name: str
    model: DecoderSpec
    task: LanguageModeling = LanguageModeling()
    precision: PrecisionSpec = PrecisionSpec()
    execution: ExecutionSpec = ExecutionSpec()
    source: str = ""
    family: str = ""
