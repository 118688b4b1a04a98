"""What a checkpoint says of a model that `jaxml quantize` made, as data. No jax.

Reads the spec files of models, tasks and numerics; `recipes.quantizing` seals it where a trained checkpoint has its
Experiment, under the same field names, so that whatever opens a checkpoint by its parts opens both.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxml.config.spec import Spec
from jaxml.models.spec import DecoderSpec, ExecutionSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.tasks.spec import LanguageModeling


@dataclass(frozen=True)
class QuantizedModel(Spec):
    """A quantized language model; `model.quantization` says how, the checkpoint's lineage of what."""

    name: str
    model: DecoderSpec
    task: LanguageModeling
    precision: PrecisionSpec
    execution: ExecutionSpec
