"""`describe` loads no array; `compare` names every field and leaf in which two checkpoints differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from jaxml.checkpoint.compare import compare, compare_experiments, describe
from jaxml.checkpoint.store import CheckpointStore
from tests.checkpoint.tiny import manifest_of, parts_of


def test_describe_gives_sizes_metrics_and_lineage_without_reading_arrays(tmp_path: Path) -> None:
    parts = parts_of()
    with CheckpointStore(tmp_path) as store:
        store.save(4, parts, manifest_of(4, parts, metrics={"eval_loss": 2.5}, lineage=({"start": "fresh"},)))
    (tmp_path / "8").mkdir()
    for folder in (tmp_path / "4").rglob("d"):
        shutil.rmtree(folder)
    found = describe(tmp_path)
    assert (found.step, found.steps, list(found.damaged)) == (4, [4], [8])
    sizes = {name: (size.num_leaves, size.num_values, size.num_bytes) for name, size in found.parts.items()}
    assert sizes == {"params": (1, 6, 24), "opt_state": (2, 3, 12)}
    assert found.parts["params"].disk_bytes == sum(
        file.stat().st_size for file in (tmp_path / "4" / "params").rglob("*") if file.is_file()
    )
    assert found.manifest.metrics == {"eval_loss": 2.5}
    assert found.manifest.lineage == ({"start": "fresh"},)
    assert json.loads(json.dumps(found.to_json()))["parts"]["params"]["num_values"] == 6


def test_compare_names_every_field_and_leaf_that_differs(tmp_path: Path) -> None:
    left, right = parts_of(1), parts_of(1)
    right["params"]["embed"]["table"] = left["params"]["embed"]["table"] + np.float32([[0, 0], [0, -0.25], [0, 0]])
    right["ema"] = {"embed": np.zeros(2, np.float32)}
    experiment = {"type": "jaxml.recipes.experiment.Experiment", "name": "tiny", "train": {"steps": 10}, "tags": ["a"]}
    with CheckpointStore(tmp_path / "a") as store:
        store.save(1, left, manifest_of(1, left))
    with CheckpointStore(tmp_path / "b") as store:
        store.save(2, right, manifest_of(2, right, experiment=experiment))
    assert compare(tmp_path / "a", tmp_path / "a").is_same
    found = compare(tmp_path / "a", tmp_path / "b")
    assert [str(difference) for difference in found.experiment] == [
        "train.steps: expected 9, got 10",
        "tags.0: expected '(absent)', got 'a'",
    ]
    (changed,) = found.leaves["params"]
    assert (changed.path, changed.max_abs_difference) == ("embed.table", 0.25)
    assert found.leaves["opt_state"] == []
    (extra,) = found.leaves["ema"]
    assert (extra.path, extra.expected) == ("embed", "(absent)")
    assert not found.is_same


def test_experiments_of_unknown_classes_can_be_compared() -> None:
    left, right = {"type": "jaxml.gone.Old", "width": 4}, {"type": "jaxml.models.New", "width": 4}
    assert [difference.path for difference in compare_experiments(left, right)] == ["type"]
