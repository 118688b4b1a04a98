"""The leaves of what is saved and restored: described for the manifest, copied to the host, asked for from Orbax.

Reads `trees`, `checkpoint.manifest` and `errors`; `checkpoint.store` reads it, and recipes describe a state's leaves with it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxml import trees
from jaxml.checkpoint.manifest import Manifest
from jaxml.errors import CheckpointError


def describe_leaves(tree: Any) -> dict[str, list[Any]]:
    """Dotted leaf path to [shape, dtype name]: what a manifest says of a part. Raises CheckpointError on typed keys."""
    leaves = {}
    for path, leaf in trees.flatten(tree).items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            todo = "derive keys from (seed, step), or store jax.random.key_data of it"
            raise CheckpointError(f"leaf {path}", expected="an array of numbers", got=f"a key {leaf.dtype}", todo=todo)
        leaves[path] = [list(leaf.shape), str(np.dtype(leaf.dtype))]
    return leaves


def abstract_part(manifest: Manifest, part: str) -> dict[str, Any]:
    """Nested dicts of ShapeDtypeStructs, without shardings, of a stored part; empty for one that is not stored."""
    stored = manifest.leaves.get(part, {})
    return trees.unflatten({path: jax.ShapeDtypeStruct(shape, dtype) for path, (shape, dtype) in stored.items()})


def to_host(parts: dict[str, Any]) -> dict[str, Any]:
    """NumPy copies that share no memory with the arrays given, which the caller may then donate.

    On the CPU the copy is explicit: np.asarray of a jax.Array is a view there, and while a view is held XLA copies what
    it was to donate. From an accelerator the transfers of all leaves overlap, and what arrives is host memory already.
    """
    leaves = [leaf for leaf in jax.tree.leaves(parts) if isinstance(leaf, jax.Array)]
    for leaf in leaves:
        leaf.copy_to_host_async()

    def copy(leaf: Any) -> np.ndarray:
        is_remote = isinstance(leaf, jax.Array) and all(device.platform != "cpu" for device in leaf.devices())
        return np.asarray(leaf) if is_remote else np.array(leaf, copy=True)

    return jax.tree.map(copy, parts)


def restore_target(leaf: Any) -> Any:
    """What tells Orbax to make a jax.Array (the struct with its sharding) or a NumPy array (an array of no memory)."""
    if getattr(leaf, "sharding", None) is not None:
        return leaf
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
