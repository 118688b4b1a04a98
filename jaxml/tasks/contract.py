"""What a task is: named loss terms, exact evaluation sums and per-row outputs, as pure functions over a bound model.

Reads `tasks.spec`; `tasks.language` and `tasks.classification` implement it, `train.step` and `recipes` call it.
Without optax and `jaxml.train`, so that serving may use tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, Key

from jaxml.errors import DataError
from jaxml.tasks.spec import TaskSpec

Batch = Mapping[str, Array]


class Term(NamedTuple):
    """One summand of the loss: it contributes `coefficient * sum / weight`, with both taken over the global batch.

    `weight` is a function of the batch alone, never of parameters or features: the step takes it over the whole batch
    before the first microbatch runs, which is what makes accumulation, padding and sharding give one gradient.
    """

    sum: Float[Array, ""]
    weight: Float[Array, ""]
    coefficient: float


@runtime_checkable
class Task(Protocol):
    """A task is a value, bound once before `jit`. `model` is what `BoundModel.bind(params)` returns.

    `rows_interact`: the loss of one row depends on the other rows of its batch; accumulation is then refused.
    """

    rows_interact: ClassVar[bool]

    @property
    def spec(self) -> TaskSpec:
        """The task as data."""
        ...

    def loss(self, model, batch: Batch, dropout_keys_B: Key[Array, " B"] | None) -> dict[str, Term]:
        """The training terms over the batch given, the main one first under the name `loss`; dropout is on if keys are
        given."""
        ...

    def evaluate(self, model, batch: Batch) -> tuple[dict[str, Array], dict[str, Array]]:
        """(sums over the batch that add up over batches, outputs of each row). Rows and tokens of padding count 0."""
        ...

    def summarize(self, sums: Mapping[str, Any], rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Metrics from the added sums and the concatenated rows, on the host; an undefined metric is left out."""
        ...

    def row_losses(self, model, batch: Batch) -> Float[Array, " B"]:
        """The mean loss of each row without dropout: tells which records are not finite."""
        ...


def require_mask(batch: Batch, name: str) -> Bool[Array, ...]:
    """`batch[name]`, or DataError unless it is bool: a segment id or count must not act as a weight (maxtext
    092c3e871)."""
    mask = batch[name]
    if mask.dtype != bool:
        raise DataError(
            f"batch[{name!r}]", expected="dtype bool", got=str(mask.dtype), todo=f"compare it: {name} = ids > 0"
        )
    return mask
