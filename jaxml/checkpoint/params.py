"""The parameters of a checkpoint alone, on a laptop or on a mesh of any shape.

Reads `checkpoint.store`, `checkpoint.folders` and `devices.sharding`; whoever uses a trained model reads this file.
"""

from __future__ import annotations

import os
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxml.checkpoint.folders import find_checkpoint
from jaxml.checkpoint.leaves import abstract_part
from jaxml.checkpoint.manifest import Manifest
from jaxml.checkpoint.store import CheckpointStore
from jaxml.devices.sharding import tree_shardings


def load_params(
    path: str | os.PathLike[str], mesh: Mesh | None = None, logical_axes: Any = None, part: str = ""
) -> tuple[dict[str, Any], Manifest]:
    """(params, manifest) of a run, checkpoints or step directory, wherever and on however many devices it was written.

    Without a mesh the leaves are NumPy arrays; on a mesh they are laid out by `logical_axes` (nested like the
    parameters), or replicated without them. part: "params" or "ema"; "" takes the averaged ones where there are some.
    Raises CheckpointError when there is no complete checkpoint or no such part.
    """
    directory, step = find_checkpoint(path)
    with CheckpointStore(directory) as store:
        manifest = store.manifest(step)
        part = part or ("ema" if "ema" in manifest.leaves else "params")
        abstract = abstract_part(manifest, part)
        if mesh is not None:
            shardings: Any = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), abstract)
            if logical_axes is not None:
                shardings, _ = tree_shardings(logical_axes, abstract, mesh)
            abstract = jax.tree.map(_placed, abstract, shardings)
        return store.restore(step, {part: abstract})[part], manifest


def _placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
