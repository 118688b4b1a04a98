"""Update rules over stacked parameters, and the learning rate over steps. The only file that composes Optax.

Reads `train.spec`; `train.state` initialises it, `train.step` applies it, `recipes.announce` shows the schedule.

Parameters of the blocks are stacked, (L, ...). Elementwise rules do not care. Muon and Adafactor do: each layer is
transformed by itself (`vmap` over the stack), and which leaf is a matrix is read from the logical axes, never from
`ndim` (Optax's own choice takes (L, D) biases for matrices and (L, D, F) kernels for none).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxml.train.spec import Adafactor, AdamW, Lion, Muon, OptimizerSpec

LogicalAxes: TypeAlias = tuple[str | None, ...]
Rate: TypeAlias = Callable[[Any], Any]


def learning_rate(spec: OptimizerSpec, total_steps: int) -> Rate:
    """The rate of update number `step` (0-based), for a Python or NumPy integer, an array of them, or a traced one.

    With w = `warmup_steps` and N = `schedule.total_steps` or `total_steps`:
    rate(s) = peak (s + 1) / (w + 1) for s < w, so rate(w) is the peak and the first update is not lost;
    afterwards, with p from 0 at s = w to 1 at s = N - 1, peak times r + (1 - r) f(p), where r = `final_ratio` and f is
    1 - p (linear), (1 + cos(pi p)) / 2 (cosine); `wsd` stays at the peak and falls linearly over its last
    `decay_steps`; `constant` stays. Beyond N - 1 the rate keeps its last value.
    """
    schedule, peak = spec.schedule, spec.learning_rate
    total = schedule.total_steps or total_steps
    warmup, last = schedule.warmup_steps, total - 1
    start = warmup
    if schedule.kind == "wsd":
        start = max(warmup, last - (schedule.decay_steps or max(1, total // 10)))

    def rate(step):
        # NumPy for numbers that are not traced: showing a schedule must not dispatch to a device.
        xp = np
        if isinstance(step, jax.Array):
            # JAX divides an int32 in float32 even where floats are float64.
            xp, step = jnp, step.astype(jnp.result_type(float))
        rising = (step + 1) / (warmup + 1)
        if schedule.kind == "constant":
            return peak * xp.where(step < warmup, rising, 1.0)
        progress = xp.clip((step - start) / max(last - start, 1), 0.0, 1.0)
        remaining = (1 + xp.cos(np.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
        falling = schedule.final_ratio + (1 - schedule.final_ratio) * remaining
        return peak * xp.where(step < warmup, rising, falling)

    return rate


def build_optimizer(spec: OptimizerSpec, total_steps: int, logical_axes: Any) -> optax.GradientTransformationExtraArgs:
    """Rule, decoupled weight decay, learning rate: `update(gradients, opt_state, params, step=step)`.

    `logical_axes`: the tree of axis names of the parameters, each leaf a tuple. The rate follows the `step` that is
    passed and not a count of its own, so a skipped update does not shift the schedule. Clipping is the step's, which
    has the norm.
    """
    rule = spec.rule
    ratios = _map_axes(lambda axes: 1.0, logical_axes)
    if isinstance(rule, AdamW):
        transform = optax.scale_by_adam(rule.b1, rule.b2, rule.epsilon)
    elif isinstance(rule, Lion):
        transform = optax.scale_by_lion(rule.b1, rule.b2)
    elif isinstance(rule, Adafactor):
        transform = _adafactor(rule, logical_axes)
    else:
        transform = _muon(rule, logical_axes)
        adam_ratio = rule.adam_learning_rate_ratio
        ratios = _map_axes(lambda axes: 1.0 if is_block_matrix(axes) else adam_ratio, logical_axes)
    decay = optax.add_decayed_weights(spec.weight_decay, mask=_map_axes(is_matrix, logical_axes))
    return optax.chain(transform, decay, _descend(learning_rate(spec, total_steps), ratios))


def is_matrix(axes: LogicalAxes) -> bool:
    """Two named axes besides the stack: kernels and tables, not biases or norms. These are decayed and factored."""
    return sum(axis not in (None, "layers") for axis in axes) == 2


def is_stacked(axes: LogicalAxes) -> bool:
    """The first axis counts layers."""
    return axes[:1] == ("layers",)


def is_block_matrix(axes: LogicalAxes) -> bool:
    """A kernel inside the blocks: what Muon orthogonalises."""
    return is_matrix(axes) and is_stacked(axes)


def _map_axes(function: Callable[[LogicalAxes], Any], logical_axes: Any) -> Any:
    return jax.tree.map(function, logical_axes, is_leaf=lambda node: isinstance(node, tuple))


def _descend(rate: Rate, ratios: Any) -> optax.GradientTransformationExtraArgs:
    def update(updates, state, params=None, **extra):
        rate_now = rate(extra["step"])
        return jax.tree.map(lambda u, ratio: (-ratio * rate_now * u).astype(u.dtype), updates, ratios), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _adafactor(rule: Adafactor, logical_axes: Any) -> optax.GradientTransformationExtraArgs:
    def label(axes: LogicalAxes) -> str:
        return ("stacked_" if is_stacked(axes) else "single_") + ("matrix" if is_matrix(axes) else "vector")

    def transform(name: str) -> optax.GradientTransformation:
        one_layer = optax.chain(
            optax.scale_by_factored_rms(
                factored=name.endswith("matrix"),
                decay_rate=rule.decay_rate,
                min_dim_size_to_factor=rule.min_dim_to_factor,
            ),
            optax.clip_by_block_rms(rule.clipping_threshold),
        )
        state_axes = (optax.FactoredState(None, v_row=0, v_col=0, v=0), optax.EmptyState())  # type: ignore[arg-type]
        return _each_layer(one_layer, state_axes) if name.startswith("stacked") else one_layer

    labels = _map_axes(label, logical_axes)
    return optax.partition({name: transform(name) for name in sorted(set(jax.tree.leaves(labels)))}, labels)


def _muon(rule: Muon, logical_axes: Any) -> optax.GradientTransformationExtraArgs:
    # Optax's own batch axis for the stack, and not a `vmap` around it: a product with two batch axes takes XLA's CPU
    # compiler twice as long.
    layer_matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    muon = optax.chain(
        optax.contrib.scale_by_muon(
            ns_steps=rule.newton_schulz_steps,
            beta=rule.beta,
            nesterov=rule.nesterov,
            weight_dimension_numbers=lambda tree: jax.tree.map(lambda _: layer_matrix, tree),
        ),
        optax.stateless(lambda updates, params: jax.tree.map(_scale_to_shape, updates)),
    )
    adam = optax.scale_by_adam(rule.adam_b1, rule.adam_b2, rule.adam_epsilon)
    labels = _map_axes(lambda axes: "muon" if is_block_matrix(axes) else "adam", logical_axes)
    return optax.partition({"adam": adam, "muon": muon}, labels)


def _scale_to_shape(update_LIO: jax.Array) -> jax.Array:
    """sqrt(max(1, out / in)), so that one rate serves every shape (github.com/KellerJordan/Muon)."""
    return update_LIO * max(1.0, update_LIO.shape[2] / update_LIO.shape[1]) ** 0.5


def _each_layer(one_layer: optax.GradientTransformation, state_axes: Any) -> optax.GradientTransformation:
    """`one_layer` applied to every layer of the stacked leaves by itself; what `state_axes` calls None is shared."""

    def update(updates, state, params=None):
        mapped = jax.vmap(one_layer.update, in_axes=(0, state_axes, 0), out_axes=(0, state_axes))
        return mapped(updates, state, params)

    return optax.GradientTransformation(jax.vmap(one_layer.init, out_axes=state_axes), update)
