"""Sealed checkpoints of a running experiment: which parts, and what the manifest says about them.

Reads `checkpoint` and `recipes.assemble`; `recipes.train` saves and restores through `Saver`.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxml import __version__, trees
from jaxml.checkpoint.manifest import Manifest
from jaxml.checkpoint.probe import check, record
from jaxml.checkpoint.store import CheckpointStore, describe_leaves, find_checkpoint
from jaxml.config.spec import from_json, to_json
from jaxml.data.prepared import Prepared
from jaxml.errors import CheckpointError, Fault
from jaxml.infer.sealed import circumstances, probe_function
from jaxml.recipes.assemble import Assembly
from jaxml.recipes.run_directory import Origin, RunRecord, refuse_changed_experiment
from jaxml.tasks.spec import TextClassification

PARTS = ("params", "opt_state", "ema", "loss_scale")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@dataclass
class Saver:
    """Saves and restores the state of one assembled run in one store."""

    assembly: Assembly
    store: CheckpointStore
    record: RunRecord
    _logits: Any = field(default=None, repr=False)

    def save(self, state: dict[str, Any], skipped: tuple[int, ...], metrics: dict[str, float]) -> float:
        """Start saving `state`; returns the seconds for which training stood still. The write goes on in the background."""
        step = int(state["step"])
        parts = {name: state[name] for name in PARTS if name in state}
        manifest = self._manifest(step, state, parts, skipped, metrics)
        return self.store.save(step, parts, manifest, self.assembly.prepared.tokenizer.files())

    def restore(self, step: int) -> tuple[dict[str, Any], tuple[int, ...]]:
        """The state at a saved step, on this run's mesh, and the data steps that it left out.

        Raises CheckpointError when the checkpoint is of another spec or its arrays do not give the sealed probe.
        """
        manifest = self.store.manifest(step)
        refuse_changed_experiment(
            from_json(manifest.experiment), self.assembly.experiment, f"the checkpoint of step {step}"
        )
        refuse_other_data(manifest, self.assembly.prepared, f"the checkpoint of step {step}")
        abstract = {name: part for name, part in self.assembly.program.abstract_state.items() if name in PARTS}
        state = self.store.restore(step, abstract)
        sharding = self.assembly.program.state_shardings["step"]
        state["step"] = jax.device_put(jnp.asarray(step, jnp.int32), sharding)
        self._check_probe(state, manifest)
        return state, tuple(manifest.skipped_steps)

    def compile(self, state: dict[str, Any]) -> None:
        """Compile what saving computes, so that the first save takes no longer than the others."""
        self._probe(state)

    def _check_probe(self, state: dict[str, Any], manifest: Manifest) -> None:
        faults = check(manifest.probe, self._probe(state), **self._circumstances())
        if faults:
            raise CheckpointError.from_faults(faults)

    def _probe(self, state: dict[str, Any]) -> np.ndarray:
        if self._logits is None:
            # Replicated: every process reads all of it.
            self._logits = jax.jit(
                probe_function(self.assembly.program.bound, self.assembly.experiment.task),
                out_shardings=NamedSharding(self.assembly.mesh, PartitionSpec()),
            )
        return np.asarray(jax.device_get(self._logits(self.assembly.program.eval_params(state))))

    def _circumstances(self) -> dict[str, str]:
        experiment = self.assembly.experiment
        return circumstances(self.assembly.mesh.shape, experiment.execution, experiment.precision)

    def _manifest(
        self,
        step: int,
        state: dict[str, Any],
        parts: dict[str, Any],
        skipped: tuple[int, ...],
        metrics: dict[str, float],
    ) -> Manifest:
        experiment, prepared = self.assembly.experiment, self.assembly.prepared
        task = experiment.task
        return Manifest(
            step=step,
            experiment=to_json(experiment),
            versions={"jaxml": __version__, **{name: importlib.metadata.version(name) for name in PACKAGES}},
            seed=experiment.train.seed,
            batch_size=experiment.train.batch_size,
            skipped_steps=skipped,
            tokenizer_fingerprint=prepared.tokenizer_fingerprint,
            data_fingerprint=prepared.fingerprint,
            metrics={name: float(value) for name, value in metrics.items()},
            lineage=tuple(self.record.lineage),
            labels=task.labels if isinstance(task, TextClassification) else (),
            leaves={part: describe_leaves(tree) for part, tree in parts.items()},
            probe=record(self._probe(state), **self._circumstances()),
            backend=jax.default_backend(),
        )


def refuse_other_data(manifest: Manifest, prepared: Prepared, owner: str) -> None:
    """Raise CheckpointError when `owner` was trained on other data, or another tokenizer, than `prepared` holds."""
    pairs = {
        "data": (manifest.data_fingerprint, prepared.fingerprint),
        "tokenizer": (manifest.tokenizer_fingerprint, prepared.tokenizer_fingerprint),
    }
    faults = [
        Fault(
            f"the {what} of {owner}",
            f"the fingerprint that it was trained on, {sealed[:16]}",
            f"{found[:16]} in {prepared.directory}",
            "restore the data it was trained on, or start a new run with --start initialise-from",
        )
        for what, (sealed, found) in pairs.items()
        if sealed != found
    ]
    if faults:
        raise CheckpointError.from_faults(faults)


def initial_params(assembly: Assembly, path: str) -> dict[str, Any]:
    """The parameters of a checkpoint (averaged ones, where there are some), on this run's mesh.

    Raises CheckpointError when there is no complete checkpoint or its parameters are not those of this model.
    """
    abstract = assembly.program.abstract_state
    return take_parts(assembly, {"params": abstract["params"]}, Origin(path))[0]["params"]


def take_parts(assembly: Assembly, state: dict[str, Any], origin: Origin) -> tuple[dict[str, Any], tuple[int, ...]]:
    """(state with the parts of another checkpoint, the data steps that it left out): start mode initialise-from.

    Raises CheckpointError when there is no complete checkpoint, or a part is not stored or not of this run's shapes.
    """
    directory, step = find_checkpoint(origin.path)
    with CheckpointStore(directory, assembly.experiment.checkpoint) as store:
        manifest = store.manifest(step)
        state, skipped = dict(state), ()
        is_exact = "opt_state" in origin.parts  # its moments belong to the parameters as they were trained
        if "params" in origin.parts:
            part = "ema" if "ema" in manifest.leaves and not is_exact else "params"
            state["params"] = _restored(store, manifest, part, assembly.program.abstract_state["params"])
            if "ema" in state:
                # A copy even where the dtype is the same: the step donates both.
                state["ema"] = jax.tree.map(lambda leaf, old: jnp.array(leaf, old.dtype), state["params"], state["ema"])
        if is_exact:
            kinds = ("opt_state", "ema", "loss_scale")
            exact = [name for name in kinds if name in state and name in (*manifest.leaves, "opt_state")]
            state |= store.restore(step, {name: assembly.program.abstract_state[name] for name in exact})
        if "step" in origin.parts:
            sharding = assembly.program.state_shardings["step"]
            state["step"] = jax.device_put(jnp.asarray(step, jnp.int32), sharding)
            skipped = manifest.skipped_steps
        return state, skipped


def _restored(store: CheckpointStore, manifest: Manifest, part: str, wanted: Any) -> Any:
    """A part in the dtypes and shardings of `wanted`, whatever dtypes it is stored in."""
    leaves = manifest.leaves[part]
    stored = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaves.get(path, [None, leaf.dtype])[1], sharding=leaf.sharding)
        for path, leaf in trees.flatten(wanted).items()
    }
    found = store.restore(manifest.step, {part: trees.unflatten(stored)})[part]
    return jax.tree.map(lambda value, leaf: value.astype(leaf.dtype), found, wanted)
