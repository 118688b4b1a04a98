"""A tiny state and its manifest, shared by the checkpoint tests."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxml.checkpoint.leaves import describe_leaves
from jaxml.checkpoint.manifest import Manifest
from jaxml.checkpoint.probe import record
from jaxml.checkpoint.store import CheckpointStore
from jaxml.config.spec import to_json
from jaxml.data.spec import DataSpec, TextSource
from jaxml.models.presets import nanogpt_cpu
from jaxml.numerics.spec import PrecisionSpec
from jaxml.recipes.experiment import Experiment
from jaxml.tasks.spec import LanguageModeling
from jaxml.train.spec import TrainSpec


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


def format_1_experiment() -> Experiment:
    """The experiment that is sealed in format_1/; a class of it that moves needs an entry in config.spec.ALIASES."""
    data = DataSpec(sources=(TextSource(path="tiny.txt"),), prepared="prepared/tiny", sequence_length=64)
    train, precision = TrainSpec(steps=9, batch_size=2), PrecisionSpec(compute="float32")
    return Experiment("format 1", nanogpt_cpu(), LanguageModeling(), data, train, precision=precision)


def format_1_parts() -> dict[str, Any]:
    """The arrays that are stored in format_1/."""
    table = np.arange(6, dtype=np.float32).reshape(3, 2) / 7
    params = {"embed": {"table": table}, "head": {"kernel": table.T.astype(ml_dtypes.bfloat16)}}
    return {
        "params": params,
        "opt_state": (np.asarray(3, np.int32), {"mu": params}),
        "ema": {"embed": {"table": -table}},
    }


def write_format_1(folder: str) -> None:
    """How format_1/ was written, once, by Orbax 0.11.36, the oldest that jaxml takes.

    A later format gets a folder of its own; this one stays as it is.
    """
    parts = format_1_parts()
    manifest = manifest_of(
        3, parts, experiment=to_json(format_1_experiment()), skipped_steps=(2,), metrics={"eval_loss": float("inf")},
        lineage=({"start": "fresh"},), labels=("ham", "spam"), probe=record(np.eye(3, dtype=np.float32)[None]),
    )  # fmt: skip
    with CheckpointStore(folder) as store:
        store.save(3, parts, manifest)
