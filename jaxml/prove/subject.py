"""What every claim is tried on: the small experiment, ragged batches of its rows, and programs that are compiled once.

Reads `prove.kept_gradient`, `prove.meshes`, `data.batches` and `train.step`; the files of claims read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxml import trees
from jaxml.data.batches import TrainBatches
from jaxml.data.prepared import Prepared
from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.models.spec import ExecutionSpec
from jaxml.prove.claims import Leaves
from jaxml.prove.kept_gradient import OWN, gradient_of, losses_of, program_of
from jaxml.prove.meshes import SINGLE, mesh_name
from jaxml.recipes.assemble import Assembly
from jaxml.recipes.experiment import Experiment
from jaxml.train.step import Program

NUM_STEPS = 2  # that are compared, one by one: the second has moments that are not zero
PRECISIONS = ("float64", "float32")
WHOLE = 2**62  # bytes of logits that are taken at once: all
ProgramKey: TypeAlias = tuple[MeshSpec, int, str]  # mesh, microbatches, precision


@dataclass(frozen=True)
class Taken:
    """One step, on the host: `values` by kind, in the order in which a step makes them: loss, gradient, norm, opt_state
    (one entry for each of its trees), params, ema. `before` and `after` are the whole states."""

    before: Any
    values: dict[str, Leaves]
    after: Any


class Subject:
    """The small experiment and what the claims share. `directory` is for runs; `wants_float32`: measure that too."""

    def __init__(self, experiment: Experiment, prepared: Prepared, directory: Path, wants_float32: bool = True):
        self.experiment, self.prepared, self.directory = experiment, prepared, directory
        self.precisions = PRECISIONS if wants_float32 else PRECISIONS[:1]
        self._programs: dict[ProgramKey, Program] = {}
        self._compiling: dict[ProgramKey, Future[float]] = {}
        self._assembled: list[tuple[str, Program]] = []
        self._expected: dict[tuple[int, str], list[Taken]] = {}

    @property
    def is_classifier(self) -> bool:
        return bool(self.prepared.labels)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The rows of a training step, made ragged: cut into more segments, padded, and masked, each row by itself."""
        rows = TrainBatches(self.prepared, self.experiment.train.batch_size).batch(step)
        return ragged(rows, np.random.default_rng(step))

    def program(self, mesh: MeshSpec, accumulate: int, precision: str) -> Program:
        """The experiment's own program, which also keeps the gradient that its optimizer was given; compiled once."""
        key = (mesh, accumulate, precision)
        if key not in self._programs:
            self._programs[key] = self._build(*key)
        if key in self._compiling:
            self._compiling.pop(key).result()
        return self._programs[key]

    def named_program(self, key: ProgramKey) -> Program:
        """The same program with the logits in one piece, to be traced for its named values; nothing is compiled."""
        return self._build(*key, execution=replace(self.experiment.execution, logits_chunk_bytes=WHOLE))

    def compile_ahead(self, keys: Iterable[ProgramKey], workers: Executor) -> None:
        """Let `workers` compile the programs that claims will ask for; `program` waits for the one it is asked for."""
        batch = self.batch(0)
        for key in dict.fromkeys(keys):
            if key not in self._programs:
                self._programs[key] = self._build(*key)
                self._compiling[key] = workers.submit(self._programs[key].train_step.compile, batch)

    @property
    def programs(self) -> list[tuple[str, Program]]:
        """Every program that a claim used so far, and what to call it."""
        kept = [
            (f"{mesh_name(mesh)}, {accumulate} microbatches, {precision}", program)
            for (mesh, accumulate, precision), program in self._programs.items()
        ]
        return kept + self._assembled

    def assembly(self, mesh: MeshSpec, **train: Any) -> Assembly:
        """The experiment on another mesh, with a program of its own; `train`: fields of the TrainSpec that change."""
        experiment = replace(self.experiment, mesh=mesh, train=replace(self.experiment.train, **train))
        program = self._build(mesh, experiment.train.accumulate, PRECISIONS[0], keeps_gradient=False)
        self._assembled.append((f"{mesh_name(mesh)}, as the recipe has it", program))
        return Assembly(experiment, program.mesh, self.prepared, program)

    def expected(self, accumulate: int, precision: str) -> list[Taken]:
        """NUM_STEPS steps on one device from the first state."""
        key = (accumulate, precision)
        if key not in self._expected:
            program = self.program(SINGLE, accumulate, precision)
            state, steps = first_state(program, self.experiment.train.seed), []
            for number in range(NUM_STEPS):
                steps.append(self._take(program, state, number))
                state = steps[-1].after
            self._expected[key] = steps
        return self._expected[key]

    def taken(self, mesh: MeshSpec, accumulate: int, precision: str, expected: list[Taken]) -> list[Taken]:
        """The same steps on a mesh or by microbatches, each from the state in which the expected one began."""
        program = self.program(mesh, accumulate, precision)
        return [self._take(program, step.before, number) for number, step in enumerate(expected)]

    def _take(self, program: Program, state: Any, number: int) -> Taken:
        """One step from a state on the host. The gradient is told as it was before clipping."""
        placed = jax.device_put(state, program.state_shardings)
        after, metrics = jax.device_get(program.train_step(placed, self.batch(number)))
        gradient = gradient_of(after, metrics, self.experiment.optimizer.clip_norm)
        values = {"loss": losses_of(metrics), "gradient": gradient}
        values["norm"] = {"grad_norm": np.asarray(metrics["grad_norm"])}
        values |= moments(after["opt_state"][OWN], list(gradient))
        values |= {kind: host(after[kind]) for kind in ("params", "ema") if kind in after}
        return Taken(state, values, after)

    def _build(
        self,
        mesh: MeshSpec,
        accumulate: int,
        precision: str,
        keeps_gradient: bool = True,
        execution: ExecutionSpec | None = None,
    ) -> Program:
        experiment = replace(self.experiment, train=replace(self.experiment.train, accumulate=accumulate))
        return program_of(experiment, build_mesh(mesh), precision, execution, keeps_gradient)


def first_state(program: Program, seed: int) -> Any:
    """On the host: the program's own first state, with every parameter moved a little, so that no bias is zero and no two
    scales are equal."""
    state = jax.tree.map(np.asarray, jax.device_get(program.init(seed)))
    rng = np.random.default_rng(seed)
    moved = {
        path: leaf + 0.05 * rng.standard_normal(leaf.shape).astype(leaf.dtype)
        for path, leaf in trees.flatten(state["params"]).items()
    }
    params = trees.unflatten(moved)
    return state | {"params": params} | ({"ema": params} if "ema" in state else {})


def moments(opt_state: Any, params: list[str]) -> dict[str, Leaves]:
    """The leaves of an optimizer's state by the tree that they are in: `opt_state.0.mu`, of leaves named as parameters are;
    what belongs to no parameter is in `opt_state`. Trees of another scale are not compared by one floor."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for path, leaf in host(opt_state).items():
        owner = next((name for name in params if path.endswith("." + name)), None)
        tree = "opt_state" if owner is None else "opt_state." + path.removesuffix("." + owner)
        found.setdefault(tree, {})[owner or path] = leaf
    return dict(found)


def ragged(batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The batch with every second row cut into one more segment, a padded tail in every third one, and of the targets a
    share of its own left out of each row. Of labelled documents some rows are made padding instead."""
    new = {name: column.copy() for name, column in batch.items()}
    segments, num_tokens = new["segment_ids"], new["tokens"].shape[1]
    for row in range(len(segments)):
        if row % 3 == 0 and num_tokens > 2:
            segments[row, rng.integers(num_tokens // 2, num_tokens) :] = 0
        if row % 2 == 0 and "loss_mask" in new and num_tokens > 2:
            cut = int(rng.integers(1, num_tokens - 1))
            segments[row, cut:] += segments[row, cut:] > 0
        new["positions"][row] = _positions(segments[row])
    for name in ("tokens", "targets", "positions"):
        if name in new:
            new[name] = np.where(segments > 0, new[name], 0)
    if "loss_mask" in new:
        share = rng.random((len(segments), 1))
        new["loss_mask"] = new["loss_mask"] & (segments > 0) & (rng.random(segments.shape) < share)
    if "is_valid" in new:
        new["is_valid"] = new["is_valid"] & (rng.random(len(segments)) < 0.8)
    return new


def _positions(segments: np.ndarray) -> np.ndarray:
    """Counted from 0 within each run of equal segment ids."""
    index = np.arange(len(segments))
    begins = np.where(np.append(True, segments[1:] != segments[:-1]), index, 0)
    return (index - np.maximum.accumulate(begins)).astype(np.int32)


def host(tree: Any) -> dict[str, np.ndarray]:
    """Dotted path to NumPy array."""
    return {path: np.asarray(leaf) for path, leaf in trees.flatten(tree).items()}
