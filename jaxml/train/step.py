"""The jitted train and eval steps, bound once to model, task, optimizer and mesh.

Reads `train.gradients`, `train.optimizer`, `train.state`, `train.lowered`, `train.digest`, `tasks`, `models.build`,
`numerics`, `devices.sharding`; `train.loop` runs it and `recipes` build it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxml import keys, trees
from jaxml.devices.placement import put_rows
from jaxml.devices.sharding import WIDTH_AXIS, batch_sharding
from jaxml.errors import ConfigError
from jaxml.models.build import BoundModel, bind_model
from jaxml.models.check import decoder_of, heads_computed_whole
from jaxml.models.spec import ExecutionSpec, ModelSpec
from jaxml.numerics.float8 import require_float8
from jaxml.numerics.loss_scale import next_loss_scale
from jaxml.numerics.spec import PrecisionSpec
from jaxml.tasks.build import build_task
from jaxml.tasks.contract import Batch, Task
from jaxml.tasks.spec import TaskSpec
from jaxml.train.digest import DIGESTS, digests, to_hex
from jaxml.train.gradients import loss_gradients
from jaxml.train.lowered import PROVENANCE, LoweredOnce
from jaxml.train.optimizer import build_optimizer, learning_rate
from jaxml.train.spec import OptimizerSpec, TrainSpec
from jaxml.train.state import State, abstract_state, bytes_per_device, init_state, widen

Metrics: TypeAlias = dict[str, Any]
HostBatch: TypeAlias = Mapping[str, Any]


class Program:
    """One run's compiled functions. `train_step` and `eval_step` are lowered once each, ahead of time or at the first
    call.

    `abstract_state` has ShapeDtypeStructs with shardings (what a checkpoint restores into); `notes` names parameters and
    heads that the mesh could not split.
    """

    def __init__(
        self,
        bound: BoundModel,
        task: Task,
        optimizer: optax.GradientTransformationExtraArgs,
        optimizer_spec: OptimizerSpec,
        train_spec: TrainSpec,
        mesh: Mesh,
    ):
        self.bound, self.task, self.mesh = bound, task, mesh
        self.has_ema = optimizer_spec.ema_decay > 0
        self.abstract_state, self.notes = abstract_state(bound, optimizer, self.has_ema, mesh)
        self.notes += heads_computed_whole(decoder_of(bound.spec), mesh.shape.get(WIDTH_AXIS, 1))
        self.state_shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        self._batch_shardings = [batch_sharding(mesh, ndim) for ndim in range(8)]
        replicated = NamedSharding(mesh, PartitionSpec())

        def start(key):
            return init_state(bound, optimizer, self.has_ema, key)

        def train(state: State, batch: Batch) -> tuple[State, Metrics]:
            return train_step(
                state, batch, bound, task, optimizer, optimizer_spec, train_spec, mesh, self.state_shardings
            )

        def evaluate(params: Any, batch: Batch):
            return task.evaluate(bound.bind(params), batch)

        self._start = jax.jit(start, out_shardings=self.state_shardings)
        jitted = jax.jit(train, donate_argnums=0, out_shardings=(self.state_shardings, replicated))
        self.train_step = LoweredOnce("train_step", jitted, ("state", self.abstract_state), self.put, mesh)
        jitted = jax.jit(evaluate, out_shardings=replicated)
        self.eval_step = LoweredOnce(
            "eval_step", jitted, ("params", self.eval_params(self.abstract_state)), self.put, mesh
        )

    def init(self, seed: int) -> State:
        """A fresh state, born sharded: no leaf ever exists whole on a device that keeps only a part of it."""
        with jax.set_mesh(self.mesh):
            return self._start(keys.step_key(seed, 0, "init"))

    def compile(self, batch: HostBatch, eval_batch: HostBatch | None = None) -> float:
        """Compile the train step (and the eval step) ahead of time for batches of these shapes; returns the seconds it
        took."""
        return self.train_step.compile(batch) + (0.0 if eval_batch is None else self.eval_step.compile(eval_batch))

    def put(self, batch: HostBatch) -> dict[str, Any]:
        """The columns that the device needs, rows split over the mesh (ShapeDtypeStructs get their sharding)."""
        columns = {name: column for name, column in batch.items() if name not in PROVENANCE}
        shardings = {name: self._batch_shardings[column.ndim] for name, column in columns.items()}
        if isinstance(next(iter(columns.values())), jax.ShapeDtypeStruct):
            return {n: jax.ShapeDtypeStruct(c.shape, c.dtype, sharding=shardings[n]) for n, c in columns.items()}
        return put_rows(columns, shardings) if jax.process_count() > 1 else jax.device_put(columns, shardings)

    def eval_params(self, state: State) -> Any:
        """The weights to evaluate and export: the averaged ones where there are any."""
        return state["ema"] if self.has_ema else state["params"]

    def memory_bytes(self) -> dict[str, int]:
        """Predicted bytes on one device by kind: `params`, `opt_state`, `ema`; once the train step is compiled also
        `batch` and `temporaries` (activations, gradients, buffers of the compiler), as the compiler planned them."""
        state = self.abstract_state
        sizes = {kind: bytes_per_device(state[kind]) for kind in ("params", "opt_state", "ema") if kind in state}
        if self.train_step.compiled is not None:
            sizes["batch"] = bytes_per_device(self.train_step.expected[1])
            analysis = self.train_step.compiled.memory_analysis()
            if analysis is not None:
                sizes["temporaries"] = int(analysis.temp_size_in_bytes)
        return sizes


def build_program(
    model_spec: ModelSpec,
    task_spec: TaskSpec,
    optimizer_spec: OptimizerSpec,
    train_spec: TrainSpec,
    mesh: Mesh,
    precision_spec: PrecisionSpec = PrecisionSpec(),
    execution_spec: ExecutionSpec = ExecutionSpec(),
) -> Program:
    """Bind a run's specs. Nothing is compiled and no array is made; the specs were checked by `recipes.checks`.

    Raises ConfigError when accumulation is asked of a task whose rows interact, and MissingExtraError for float8 without
    Qwix.
    """
    task = build_task(task_spec, execution_spec)
    if task.rows_interact and train_spec.accumulate > 1:
        raise ConfigError(
            "train.accumulate",
            expected=f"1: the rows of {type(task_spec).__name__} interact, so microbatches are another loss",
            got=str(train_spec.accumulate),
            todo="pass --train.accumulate 1 and use more devices, or a smaller batch",
        )
    bound = bind_model(model_spec, precision_spec, execution_spec, mesh.devices.flat[0].platform)
    if bound.policy.is_float8:
        require_float8()
    optimizer = build_optimizer(optimizer_spec, train_spec.steps, bound.logical_axes)
    return Program(bound, task, optimizer, optimizer_spec, train_spec, mesh)


def train_step(
    state: State,
    batch: Batch,
    bound: BoundModel,
    task: Task,
    optimizer: optax.GradientTransformationExtraArgs,
    optimizer_spec: OptimizerSpec,
    train_spec: TrainSpec,
    mesh: Mesh,
    shardings: Any,
) -> tuple[State, Metrics]:
    """One update. Pure; everything but `state` and `batch` is bound before `jit`.

    Metrics: `loss` (what is minimised), `loss/<term>` (the mean of each term, without its coefficient), `grad_norm`
    (before clipping, over all leaves and devices), `leaf_grad_norms` [leaves in the order of trees.flatten(params)],
    `learning_rate`, `num_tokens` (not padding), `is_finite` (loss and gradient), `update_applied`.
    A step that is not finite leaves everything but `step` as it was.

    In float16 also `loss_scale` (of this step), `is_overflow` (the loss is finite and the scaled gradient is not: the
    scale halves), `skipped_updates` (left out for overflow so far) and `skipped_in_a_row`. Norms, clipping and the check
    see the unscaled float32 gradient of all devices, so all of them take or leave a step together.
    With `train.digests` also `digest_batch`, `digest_gradients` (unscaled, before clipping) and `digest_params` (updated).
    """
    step, params, scaling = state["step"], state["params"], bound.policy.loss_scale
    has_dropout = decoder_of(bound.spec).dropout > 0
    dropout_key = keys.step_key(train_spec.seed, step, "dropout") if has_dropout else None
    loss, means, gradients = loss_gradients(
        bound,
        task,
        params,
        batch,
        dropout_key,
        train_spec.accumulate,
        mesh,
        shardings["params"],
        None if scaling is None else state["loss_scale"]["scale"],
    )
    raw_gradients = gradients
    leaf_norms = jnp.stack([jnp.sqrt(jnp.sum(jnp.square(leaf))) for leaf in trees.flatten(gradients).values()])
    norm = jnp.sqrt(jnp.sum(jnp.square(leaf_norms)))
    is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    if optimizer_spec.clip_norm > 0:
        # The norm of the global gradient, so clipping does not depend on devices or microbatches (nanochat 061f83c).
        shrink = optimizer_spec.clip_norm / jnp.maximum(norm, optimizer_spec.clip_norm)
        gradients = jax.tree.map(lambda leaf: leaf * shrink.astype(leaf.dtype), gradients)
    wide = widen(params)
    updates, opt_state = optimizer.update(gradients, state["opt_state"], wide, step=step)
    updated: State = {
        "params": jax.tree.map(lambda old, w, update: (w + update).astype(old.dtype), params, wide, updates),
        "opt_state": opt_state,
    }
    if "ema" in state:
        updated["ema"] = average(state["ema"], widen(updated["params"]), optimizer_spec.ema_decay)
    kept = {
        kind: jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), updated[kind], state[kind])
        for kind in updated
    }
    metrics: Metrics = {
        "loss": loss,
        **{f"loss/{name}": mean for name, mean in means.items()},
        "grad_norm": norm,
        "leaf_grad_norms": leaf_norms,
        "learning_rate": jnp.asarray(learning_rate(optimizer_spec, train_spec.steps)(step)),
        "num_tokens": jnp.sum(batch["segment_ids"] > 0, dtype=jnp.int32),
        "is_finite": is_finite,
        "update_applied": is_finite,
    }
    if scaling is not None:
        is_overflow = jnp.isfinite(loss) & ~is_finite
        kept["loss_scale"] = next_loss_scale(scaling, state["loss_scale"], is_finite, is_overflow)
        metrics |= {
            "loss_scale": state["loss_scale"]["scale"],
            "is_overflow": is_overflow,
            "skipped_updates": kept["loss_scale"]["skipped"],
            "skipped_in_a_row": kept["loss_scale"]["skipped_in_a_row"],
        }
    if train_spec.digests:
        metrics |= digests(batch, raw_gradients, kept["params"])
    return {"step": step + 1, **kept}, metrics


def average(ema: Any, params: Any, decay: float) -> Any:
    """decay * ema + (1 - decay) * params: a decay near 1 remembers long (levanter PR 883 had it backwards)."""
    return jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, params)


def to_host(metrics: Metrics) -> dict[str, Any]:
    """Python numbers, NumPy arrays for what has dimensions, and digests as hexadecimal text, in one transfer; waits for
    the step to finish."""
    fetched: dict[str, np.ndarray] = jax.device_get(metrics)
    return {
        name: to_hex(value) if name in DIGESTS else value if value.ndim else value.item()
        for name, value in fetched.items()
    }
