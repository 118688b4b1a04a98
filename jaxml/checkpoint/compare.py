"""What is in a checkpoint without loading an array, and how two checkpoints differ, leaf by leaf.

Reads `checkpoint.store` and its neighbours; `jaxml inspect` and reports print what these return.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from jaxml import trees
from jaxml.checkpoint.folders import find_checkpoint, read_manifest, resolve
from jaxml.checkpoint.leaves import abstract_part
from jaxml.checkpoint.manifest import Manifest
from jaxml.checkpoint.store import CheckpointStore
from jaxml.config.spec import Difference
from jaxml.trees import LeafDifference


@dataclass(frozen=True)
class PartSize:
    """One part of a checkpoint: leaves, numbers, bytes in memory, and bytes on disk (compressed)."""

    num_leaves: int
    num_values: int
    num_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Description:
    """What `describe` finds. `steps` are the complete ones beside it, `damaged` says what is wrong with the others."""

    directory: str
    step: int
    steps: list[int]
    damaged: dict[int, str]
    parts: dict[str, PartSize]
    manifest: Manifest

    def to_json(self) -> dict[str, Any]:
        """One JSON object for `jaxml inspect --json`."""
        return {
            "directory": self.directory,
            "step": self.step,
            "steps": self.steps,
            "damaged": {str(step): text for step, text in self.damaged.items()},
            "parts": {name: asdict(size) for name, size in self.parts.items()},
            "manifest": self.manifest.to_json(),
        }


@dataclass(frozen=True)
class Comparison:
    """How two checkpoints differ: fields of the experiment, and leaves by part (all, in a part that one side lacks)."""

    experiment: list[Difference]
    leaves: dict[str, list[LeafDifference]]

    @property
    def is_same(self) -> bool:
        """No field and no bit of any leaf differs."""
        return not self.experiment and not any(self.leaves.values())


def describe(path: str | os.PathLike[str]) -> Description:
    """Spec, sizes by part, step, metrics and lineage of a checkpoint; no array is loaded.

    `path`: a run directory, a checkpoints directory or the folder of one step. Raises CheckpointError where
    `find_checkpoint` does.
    """
    directory, step = find_checkpoint(path)
    with CheckpointStore(directory) as store:
        manifest = store.manifest(step)
        parts = {
            part: PartSize(
                num_leaves=len(leaves),
                num_values=sum(math.prod(shape) for shape, _ in leaves.values()),
                num_bytes=trees.num_bytes(abstract_part(manifest, part)),
                disk_bytes=_disk_bytes(store.directory / str(step) / part),
            )
            for part, leaves in manifest.leaves.items()
        }
        damaged = {step: str(fault) for step, fault in store.damaged().items()}
        return Description(directory, step, store.steps(), damaged, parts, manifest)


def compare(expected: str | os.PathLike[str], got: str | os.PathLike[str]) -> Comparison:
    """Every difference between two checkpoints; loads one part of both at a time. Paths as in `describe`."""
    sides = [find_checkpoint(path) for path in (expected, got)]
    manifests = [read_manifest(resolve(directory), step) for directory, step in sides]
    parts = list(dict.fromkeys(part for manifest in manifests for part in manifest.leaves))
    leaves = {}
    for part in parts:
        loaded = [
            _load(directory, step, manifest, part) for (directory, step), manifest in zip(sides, manifests, strict=True)
        ]
        leaves[part] = trees.compare(*loaded)
    return Comparison(compare_experiments(*(manifest.experiment for manifest in manifests)), leaves)


def compare_experiments(expected: dict[str, Any], got: dict[str, Any]) -> list[Difference]:
    """Leaf by leaf, the differences of two tagged JSON objects; they need not resolve to classes of this jaxml."""
    left, right = dict(_json_leaves(expected, "")), dict(_json_leaves(got, ""))
    paths = [*left, *(path for path in right if path not in left)]
    absent = "(absent)"
    return [
        Difference(path, repr(left.get(path, absent)), repr(right.get(path, absent)))
        for path in paths
        if left.get(path, absent) != right.get(path, absent)
    ]


def _json_leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
    else:
        for key, item in items:
            yield from _json_leaves(item, f"{path}.{key}".lstrip("."))


def _load(directory: str, step: int, manifest: Manifest, part: str) -> dict[str, Any]:
    if part not in manifest.leaves:
        return {}
    with CheckpointStore(directory) as store:
        return store.restore(step, {part: abstract_part(manifest, part)})[part]


def _disk_bytes(folder: Any) -> int:
    if not folder.is_dir():
        return 0
    return sum(_disk_bytes(entry) if entry.is_dir() else entry.stat().length for entry in folder.iterdir())
