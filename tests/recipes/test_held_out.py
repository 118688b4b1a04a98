"""The loss on held-out data is the one that the run measured itself, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from jaxml.checkpoint.compare import describe
from jaxml.checkpoint.manifest import Manifest
from jaxml.errors import CheckpointError
from jaxml.recipes.held_out import evaluate_held_out
from jaxml.recipes.importing import import_model
from tests.models.families.tiny import CONFIG, random_tensors, write
from tests.recipes.conftest import NOWHERE


def test_the_loss_is_the_one_that_the_run_measured(straight):
    found = evaluate_held_out(straight.run_dir, NOWHERE)
    sealed = describe(straight.run_dir).manifest.metrics
    assert found["eval_loss"] == sealed["eval_loss"] == straight.result.metrics["eval_loss"]
    assert found["eval_num_tokens"] == sealed["eval_num_tokens"]
    earlier = evaluate_held_out(straight.run_dir / "checkpoints" / "16", NOWHERE)
    assert earlier["eval_loss"] != found["eval_loss"]


def test_data_that_is_not_what_the_run_had_is_refused(straight, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(straight.run_dir, run_dir)
    file = run_dir / "checkpoints" / "24" / "manifest" / "metadata"
    other = dataclasses.replace(Manifest.from_json(json.loads(file.read_text())), data_fingerprint="0" * 64)
    file.write_text(json.dumps(other.to_json()))
    with pytest.raises(CheckpointError, match="the data of the checkpoint of step 24"):
        evaluate_held_out(run_dir, NOWHERE)


def test_an_imported_model_has_no_held_out_data(tmp_path):
    import_model(write(tmp_path / "hf", CONFIG, random_tensors(CONFIG)), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"--text, or a set with --set"):
        evaluate_held_out(tmp_path / "out", NOWHERE)
