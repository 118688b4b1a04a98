"""The documents of one training step, each with its own loss and gradient norm, the worst first.

Reads `prove.replay` for the parameters of that time, `data` for the documents, `models.build` and `tasks`; `cli.blame`
prints it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.models.build import BoundModel, bind_model
from jaxml.numerics.precision import cast_floating
from jaxml.numerics.spec import PrecisionSpec
from jaxml.prove.replay import PastRun, Place, open_past_run, require_step, state_at
from jaxml.recipes.assemble import Assembly
from jaxml.tasks.build import build_task
from jaxml.tasks.contract import Task
from jaxml.train.lowered import PROVENANCE

# Steps that are taken again for the exact parameters; from farther back those of the checkpoint do.
MOST_REPLAYED = 20
MOST_CHARACTERS = 160
# The column that says what of a row counts, and is cut down to one segment.
MASKS = ("loss_mask", "is_valid")


@dataclass(frozen=True)
class Piece:
    """One segment of the batch: a document, or a piece of it from token `start` on.

    `loss`: mean nats a token over its own tokens (of a classifier: of its label). `grad_norm`: of the gradient that a batch
    of this segment alone would give. `text` is cut to MOST_CHARACTERS.
    """

    row: int
    document: int
    place: str
    label: str | None
    start: int
    num_tokens: int
    text: str
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Blame:
    """`pieces`, the worst first; those whose loss or gradient is not a number before all others. `at`: which parameters."""

    step: int
    at: Place
    pieces: tuple[Piece, ...]


def blame(run_dir: str, step: int, most_replayed: int = MOST_REPLAYED) -> Blame:
    """What each document in the batch of a step (counted from 1) did to it, at the parameters that the step began with.

    Those are taken again exactly from the checkpoint before, unless that is more than `most_replayed` steps away: then the
    checkpoint's own are used, and `at` says so. Without dropout and in float32 (float64 for a run in float64).
    Raises RunError for a step that the run did not take.
    """
    run = open_past_run(run_dir)
    require_step(run, step)
    state, at = state_at(run, step - 1, most_replayed)
    batch = run.batches.batch(step - 1)
    found = _pieces(run, jax.device_get(state["params"]), batch)
    # A loss that is not a number is worse than any number.
    worst_first = sorted(found, key=lambda piece: (_is_number(piece), -piece.loss if _is_number(piece) else 0.0))
    return Blame(step, at, tuple(worst_first))


def loss_and_norm(
    bound: BoundModel, task: Task, params: Any, batch: Mapping[str, Array], row: Int[Array, ""], segment: Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(`loss` of the task, norm of the gradient of all its terms) over one segment of one row. Pure: row and segment are
    arguments, so that one compiled program does for all documents."""
    one = {name: jax.lax.dynamic_slice_in_dim(column, row, 1) for name, column in batch.items()}
    mask = next(name for name in MASKS if name in one)
    is_here = one["segment_ids"] == segment
    one[mask] = one[mask] & (is_here if one[mask].ndim > 1 else is_here.any(axis=1))

    def objective(params: Any) -> tuple[Array, Array]:
        terms = task.loss(bound.bind(params), one, None)
        means = {name: term.sum / jnp.where(term.weight > 0, term.weight, 1) for name, term in terms.items()}
        return sum(term.coefficient * means[name] for name, term in terms.items()), means["loss"]  # type: ignore[return-value]

    gradients, loss = jax.grad(objective, has_aux=True)(params)
    return loss, jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients)))


def _pieces(run: PastRun, params: Any, batch: dict[str, np.ndarray]) -> list[Piece]:
    prepared = run.assembly.prepared
    columns = {name: column for name, column in batch.items() if name not in PROVENANCE}
    measure = _measure(run.assembly, params, columns)
    found = []
    for row, (source, record) in enumerate(zip(batch["source"].tolist(), batch["record"].tolist(), strict=True)):
        for number, (document, start, length) in enumerate(prepared.segments("train", source, record).tolist(), 1):
            loss, norm = measure(row, number)
            info = prepared.describe_document(document)
            text = prepared.tokenizer.decode(prepared.tokens(document, start, length))
            clipped = text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."
            found.append(Piece(row, document, info.place, info.label, start, length, clipped, loss, norm))
    return found


def _measure(assembly: Assembly, params: Any, columns: dict[str, np.ndarray]) -> Any:
    """(row, segment) -> (loss, gradient norm), on one device."""
    experiment = assembly.experiment
    dtype = "float64" if experiment.precision.compute == "float64" else "float32"
    mesh = build_mesh(MeshSpec(data=1))
    backend = mesh.devices.flat[0].platform
    bound = bind_model(experiment.model, PrecisionSpec(dtype, dtype), experiment.execution, backend)
    task = build_task(experiment.task, experiment.execution)
    wide = cast_floating(jax.device_put(params, mesh.devices.flat[0]), jnp.dtype(dtype))
    rows = jax.device_put(columns, mesh.devices.flat[0])
    jitted = jax.jit(lambda *arguments: loss_and_norm(bound, task, *arguments))

    def measure(row: int, segment: int) -> tuple[float, float]:
        with jax.set_mesh(mesh):
            loss, norm = jax.device_get(jitted(wide, rows, np.int32(row), np.int32(segment)))
        return float(loss), float(norm)

    return measure


def _is_number(piece: Piece) -> bool:
    return math.isfinite(piece.loss) and math.isfinite(piece.grad_norm)
