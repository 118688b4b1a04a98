"""A tiny state and its manifest, shared by the checkpoint tests."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxml.checkpoint.leaves import describe_leaves
from jaxml.checkpoint.manifest import Manifest


def parts_of(value: float = 1.0) -> dict[str, Any]:
    """Two parts whose numbers all depend on `value`."""
    params = {"embed": {"table": np.full((3, 2), value, np.float32)}}
    return {"params": params, "opt_state": (np.asarray(int(value), np.int32), {"mu": np.full(2, -value, np.float32)})}


def manifest_of(step: int, parts: dict[str, Any], **fields: Any) -> Manifest:
    """A manifest that describes `parts`; `fields` replace the defaults."""
    defaults: dict[str, Any] = {
        "experiment": {"type": "jaxml.recipes.experiment.Experiment", "name": "tiny", "train": {"steps": 9}},
        "versions": {"jax": jax.__version__},
        "seed": 7,
        "batch_size": 2,
        "tokenizer_fingerprint": "t",
        "data_fingerprint": "d",
        "leaves": {part: describe_leaves(tree) for part, tree in parts.items()},
        "probe": {},
        "backend": "cpu",
    }
    return Manifest(step=step, **{**defaults, **fields})


def abstract(parts: dict[str, Any]) -> dict[str, Any]:
    """The ShapeDtypeStructs, without shardings, of `parts`."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), parts)
