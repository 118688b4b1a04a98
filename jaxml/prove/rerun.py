"""One training step again in float64, and the first value, in program order, in which two experiments' steps differ.

Reads `prove.named_values`, `prove.parting`, `prove.subject` and `prove.claims` (the bound), and `train.step`; `prove.diverge`
calls it. Two float32 steps differ by rounding as soon as anything is computed in another order; in float64 rounding stays
below the bound, so that what is above it is a difference of mathematics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxml import keys, trees
from jaxml.models.build import bind_model
from jaxml.models.check import decoder_of
from jaxml.numerics.spec import PrecisionSpec
from jaxml.prove.claims import BOUND, PARTED, Leaves, Parting, distances, undecided, worst
from jaxml.prove.named_values import named_values
from jaxml.prove.parting import Step, in_layers
from jaxml.prove.subject import GRADIENT, keeping_gradient
from jaxml.recipes.assemble import Assembly
from jaxml.tasks.build import build_task
from jaxml.train.optimizer import build_optimizer
from jaxml.train.step import Program

# The parts of a step in program order, and which file makes what of each.
MAKERS = {
    "values": "jaxml/models",
    "loss": "jaxml/train/gradients.py",
    "gradient": "jaxml/train/gradients.py (the backward pass)",
    "parameters": "jaxml/train/step.py and jaxml/train/optimizer.py",
}
# Where the backward pass meets a parameter, from the loss on.
BACKWARD = ("head", "final_norm", "blocks", "positions", "embed")
WHOLE = 2**62  # bytes: the named pass takes the logits in one piece, so that they compare whatever the chunks are


@dataclass(frozen=True)
class Step64:
    """What a step makes in float64, on the host: for each part, in program order, its values by name; and by which line of
    which file the named ones are made."""

    parts: dict[str, Leaves]
    made_by: dict[str, str]


def step_in_float64(assembly: Assembly, state: Any, batch: dict[str, np.ndarray], step: int) -> Step64:
    """The step with the number `step` (from 0) of an experiment, on its mesh and in its execution, from `state` on the host.

    In float64 throughout; quantised products are plain ones and there is no loss scale. The named values are those of a
    forward pass of the whole batch; loss, gradient (before clipping) and new parameters are made by the experiment's own
    microbatches and chunks. `parameters` are left out where the optimizer keeps another state than the one in `state`.
    """
    experiment = assembly.experiment
    with jax.enable_x64(True):
        program = _program(assembly)
        rows = program.put(batch)
        wide = {kind: jax.tree.map(_wide, tree) for kind, tree in state.items() if kind in program.abstract_state}
        own = program.abstract_state["opt_state"]["own"]
        has_same_optimizer = same_shapes(wide["opt_state"], own)
        wide["opt_state"] = jax.tree.map(
            lambda leaf: np.zeros(leaf.shape, leaf.dtype), program.abstract_state["opt_state"]
        )
        if has_same_optimizer:
            wide["opt_state"]["own"] = jax.tree.map(_wide, state["opt_state"])
        placed = jax.device_put(wide, program.state_shardings)
        named = _forward(assembly, program, placed["params"], rows, step)
        after, metrics = jax.device_get(program.train_step(placed, batch))
    clip, norm = experiment.optimizer.clip_norm, metrics["grad_norm"]
    kept = clip / max(norm, clip) if clip > 0 else 1.0
    gradient = {path: leaf / kept for path, leaf in trees.flatten(after["opt_state"][GRADIENT]).items()}
    parts: dict[str, Leaves] = {
        "values": {value.name: value.value for value in named},
        "loss": {name: np.asarray(value) for name, value in metrics.items() if name.split("/")[0] == "loss"},
        "gradient": {path: gradient[path] for path in sorted(gradient, key=_place_backward)},
    }
    if has_same_optimizer:
        parts["parameters"] = trees.flatten(after["params"])
    return Step64(parts, {value.name: value.made_by for value in named})


def first_apart(one: Step64, other: Step64) -> tuple[Parting | None, float, int]:
    """(the first value that is apart by more than rounding, the largest error as a share of a value's scale, how many
    updated elements were left out because their gradient is rounding alone).

    Only names that both made, of one shape, are compared. None where no error exceeds the bound.
    """
    gradients = [side.parts["gradient"] for side in (other, one)]
    masks = undecided(*gradients) if same_shapes(*gradients) else {}
    largest, first = 0.0, None
    for part in one.parts:
        if part not in other.parts:
            continue
        left, right = one.parts[part], other.parts[part]
        both = [name for name in left if name in right and left[name].shape == right[name].shape]
        ignored = masks if part == "parameters" else None
        errors = distances({name: right[name] for name in both}, {name: left[name] for name in both}, ignored)
        largest = max(largest, worst(errors))
        if first is None and not worst(errors) <= BOUND:
            name = next(name for name in errors if not errors[name] <= PARTED * BOUND)
            told = name if part in ("values", "loss") else f"{part} of {name}"
            first = Parting(told, one.made_by.get(name, MAKERS[part]), errors[name])
    return first, largest, sum(int(mask.sum()) for mask in masks.values())


def same_shapes(tree: Any, abstract: Any) -> bool:
    """Whether two trees have the same leaves of the same shapes."""
    shapes = [{path: leaf.shape for path, leaf in trees.flatten(side).items()} for side in (tree, abstract)]
    return shapes[0] == shapes[1]


def _program(assembly: Assembly) -> Program:
    """The experiment's step in float64, whose optimizer keeps the gradient that it was given."""
    experiment = assembly.experiment
    backend = assembly.mesh.devices.flat[0].platform
    bound = bind_model(experiment.model, PrecisionSpec("float64", "float64"), experiment.execution, backend)
    optimizer = build_optimizer(experiment.optimizer, experiment.train.steps, bound.logical_axes)
    task = build_task(experiment.task, experiment.execution)
    train = replace(experiment.train, digests=False)
    return Program(bound, task, keeping_gradient(optimizer), experiment.optimizer, train, assembly.mesh)


def _forward(assembly: Assembly, program: Program, params: Any, rows: Any, step: int) -> list[Step]:
    experiment = assembly.experiment
    decoder = decoder_of(experiment.model)
    task = build_task(experiment.task, replace(experiment.execution, logits_chunk_bytes=WHOLE))

    def forward(params: Any, rows: Any) -> list[Any]:
        dropout_keys_B = None
        if decoder.dropout > 0:
            dropout_keys_B = keys.row_keys(keys.step_key(experiment.train.seed, step, "dropout"), rows["row"])
        return [term.sum for term in task.loss(program.bound.bind(params), rows, dropout_keys_B).values()]

    return in_layers(named_values(forward, (params, rows), assembly.mesh), decoder)


def _place_backward(path: str) -> int:
    """Where the backward pass meets a parameter."""
    rooms = path.split(".")
    return next((place for place, room in enumerate(BACKWARD) if room in rooms), len(BACKWARD))


def _wide(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(np.float64) if jax.dtypes.issubdtype(array.dtype, np.floating) else array
