"""The training state: what is in it, where each leaf lies, how it is born, and how many bytes it takes.

Reads `devices.sharding`, `models.build` and `numerics.loss_scale`; `train.step` builds on it. A state is a plain dict:
`step` (int32 scalar: updates tried so far), `params`, `opt_state`, `ema` when the averaging is on, and `loss_scale` (the
scalars of `numerics.loss_scale`) in float16.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key

from jaxml.devices.sharding import tree_shardings
from jaxml.models.build import BoundModel
from jaxml.numerics.loss_scale import initial_loss_scale

State: TypeAlias = dict[str, Any]


def widen(tree: Any) -> Any:
    """Floating leaves in promote_types(their dtype, float32): the dtype of gradients, moments and averages."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)


def init_state(
    bound: BoundModel, optimizer: optax.GradientTransformationExtraArgs, has_ema: bool, key: Key[Array, ""]
) -> State:
    """The state before the first update. Pure; run it under one `jit` with the shardings of `abstract_state`."""
    params = bound.init(key)
    state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt_state": optimizer.init(widen(params))}
    scaling = bound.policy.loss_scale
    loss_scale = {} if scaling is None else {"loss_scale": initial_loss_scale(scaling)}
    return state | ({"ema": widen(params)} if has_ema else {}) | loss_scale


def abstract_state(
    bound: BoundModel, optimizer: optax.GradientTransformationExtraArgs, has_ema: bool, mesh: Mesh
) -> tuple[State, list[str]]:
    """(the state as ShapeDtypeStructs with shardings, notes on leaves that an axis did not divide).

    A moment or average lies as its parameter does; counts, the loss scale, and the factored statistics of Adafactor (one
    vector for each side of a matrix) are replicated.
    """
    shapes = jax.eval_shape(lambda key: init_state(bound, optimizer, has_ema, key), jax.random.key(0))
    shardings, notes = tree_shardings(bound.logical_axes, bound.abstract_params, mesh)
    # By key path and not by optax.tree_map_params: a masked or partitioned transform holds only part of the parameter
    # tree.
    of_param = dict(jax.tree_util.tree_flatten_with_path(shardings)[0])
    shape_of = {path: leaf.shape for path, leaf in jax.tree_util.tree_flatten_with_path(shapes["params"])[0]}
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        owners = [path[start:] for start in range(len(path)) if path[start:] in of_param]
        is_like_owner = bool(owners) and shape_of[owners[0]] == leaf.shape
        sharding = of_param[owners[0]] if is_like_owner else replicated
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, shapes), notes


def bytes_per_device(tree: Any) -> int:
    """Bytes that the largest shard of every leaf takes on one device (ShapeDtypeStructs with shardings, or arrays)."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
