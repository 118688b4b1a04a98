"""One training step again in float64, and the first value, in program order, in which two experiments' steps differ.

Reads `prove.kept_gradient`, `prove.named_values`, `prove.parting` and `prove.claims` (the bound); `prove.diverge` calls it.
Two float32 steps differ by rounding as soon as anything is computed in another order; in float64 rounding stays below the
bound, so that what is above it is a difference of mathematics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxml import keys, trees
from jaxml.models.check import decoder_of
from jaxml.prove.claims import BOUND, PARTED, Leaves, Parting, distances, undecided, worst
from jaxml.prove.kept_gradient import OWN, gradient_of, losses_of, program_of
from jaxml.prove.named_values import named_values
from jaxml.prove.parting import Step, in_backward_order, in_layers
from jaxml.prove.subject import WHOLE
from jaxml.recipes.assemble import Assembly
from jaxml.tasks.build import build_task
from jaxml.train.step import Program

# The parts of a step in program order, and which file makes what of each.
MAKERS = {
    "values": "jaxml/models",
    "loss": "jaxml/train/gradients.py",
    "gradient": "jaxml/train/gradients.py (the backward pass)",
    "parameters": "jaxml/train/step.py and jaxml/train/optimizer.py",
}


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
        program = program_of(experiment, assembly.mesh, "float64")
        rows = program.put(batch)
        wide = {kind: jax.tree.map(_wide, tree) for kind, tree in state.items() if kind in program.abstract_state}
        own = program.abstract_state["opt_state"][OWN]
        has_same_optimizer = same_shapes(wide["opt_state"], own)
        wide["opt_state"] = jax.tree.map(
            lambda leaf: np.zeros(leaf.shape, leaf.dtype), program.abstract_state["opt_state"]
        )
        if has_same_optimizer:
            wide["opt_state"][OWN] = jax.tree.map(_wide, state["opt_state"])
        placed = jax.device_put(wide, program.state_shardings)
        named = _forward(assembly, program, placed["params"], rows, step)
        after, metrics = jax.device_get(program.train_step(placed, batch))
    gradient = gradient_of(after, metrics, experiment.optimizer.clip_norm)
    parts: dict[str, Leaves] = {
        "values": {value.name: value.value for value in named},
        "loss": losses_of(metrics),
        "gradient": {path: gradient[path] for path in in_backward_order(gradient)},
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


def _forward(assembly: Assembly, program: Program, params: Any, rows: Any, step: int) -> list[Step]:
    experiment = assembly.experiment
    decoder = decoder_of(experiment.model)
    # The logits in one piece, so that they compare whatever the chunks are.
    task = build_task(experiment.task, replace(experiment.execution, logits_chunk_bytes=WHOLE))

    def forward(params: Any, rows: Any) -> list[Any]:
        dropout_keys_B = None
        if decoder.dropout > 0:
            dropout_keys_B = keys.row_keys(keys.step_key(experiment.train.seed, step, "dropout"), rows["row"])
        return [term.sum for term in task.loss(program.bound.bind(params), rows, dropout_keys_B).values()]

    return in_layers(named_values(forward, (params, rows), assembly.mesh), decoder)


def _wide(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(np.float64) if jax.dtypes.issubdtype(array.dtype, np.floating) else array
