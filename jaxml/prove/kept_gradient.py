"""An experiment's own step in another precision, which also keeps the gradient that its optimizer was given.

Reads `models.build`, `tasks.build`, `train.optimizer` and `train.step`; `prove.subject` and `prove.rerun` take steps with it.
The step itself is not changed: the gradient is kept in the optimizer's state, beside the optimizer's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxml import trees
from jaxml.models.build import bind_model
from jaxml.models.spec import ExecutionSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.prove.claims import Leaves
from jaxml.recipes.experiment import Experiment
from jaxml.tasks.build import build_task
from jaxml.train.optimizer import build_optimizer
from jaxml.train.step import Program

GRADIENT, OWN = "gradient of the last step", "own"


def program_of(
    experiment: Experiment,
    mesh: Mesh,
    precision: str,
    execution: ExecutionSpec | None = None,
    keeps_gradient: bool = True,
) -> Program:
    """The experiment's program on a mesh, with `precision` for parameters and products, and without digests.

    `execution`: another one than the experiment's (None). With `keeps_gradient` the state's `opt_state` is {GRADIENT: as
    clipped, OWN: the optimizer's}.
    """
    execution = execution or experiment.execution
    policy = PrecisionSpec(precision, precision)  # type: ignore[arg-type]
    bound = bind_model(experiment.model, policy, execution, mesh.devices.flat[0].platform)
    optimizer = build_optimizer(experiment.optimizer, experiment.train.steps, bound.logical_axes)
    optimizer = keeping_gradient(optimizer) if keeps_gradient else optimizer
    train = replace(experiment.train, digests=False)
    return Program(bound, build_task(experiment.task, execution), optimizer, experiment.optimizer, train, mesh)


def keeping_gradient(optimizer: Any) -> Any:
    """The same optimizer whose state has the gradient, as clipped, beside its own."""

    def init(params: Any) -> dict[str, Any]:
        return {GRADIENT: jax.tree.map(lambda leaf: leaf * 0, params), OWN: optimizer.init(params)}

    def update(gradients: Any, state: dict[str, Any], params: Any = None, **extra: Any) -> tuple[Any, dict[str, Any]]:
        updates, own = optimizer.update(gradients, state[OWN], params, **extra)
        return updates, {GRADIENT: gradients, OWN: own}

    return optimizer._replace(init=init, update=update)


def losses_of(metrics: dict[str, Any]) -> Leaves:
    """The loss and its terms."""
    return {name: np.asarray(value) for name, value in metrics.items() if name.split("/")[0] == "loss"}


def gradient_of(after: Any, metrics: dict[str, Any], clip_norm: float) -> Leaves:
    """The kept gradient of a state on the host, as it was before clipping."""
    norm = float(metrics["grad_norm"])
    shrunk = clip_norm / max(norm, clip_norm) if clip_norm > 0 else 1.0
    return {path: np.asarray(leaf) / shrunk for path, leaf in trees.flatten(after["opt_state"][GRADIENT]).items()}
