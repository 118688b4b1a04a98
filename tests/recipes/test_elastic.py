"""A run that goes on with other devices sees the same records and gives the same losses."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from jaxml.devices.spec import MeshSpec
from jaxml.observe.metrics_log import read_metrics
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.train import resume, train
from jaxml.train.spec import ScheduleSpec
from tests.recipes.conftest import quiet, small_experiment

AFTER = 20  # steps after each change


def elastic_experiment(directory: Path, steps: int) -> Experiment:
    """Two packed sources mixed, several epochs, dropout; a global batch of 24 rows on eight devices."""
    experiment = small_experiment(directory)
    return dataclasses.replace(
        experiment,
        # A rate that does not depend on where the run is said to end.
        optimizer=dataclasses.replace(experiment.optimizer, schedule=ScheduleSpec("constant")),
        train=dataclasses.replace(
            experiment.train, steps=steps, batch_size=24, accumulate=1, eval_every=0, digests=True
        ),
        mesh=MeshSpec(data=2, fsdp=4),
        checkpoint=dataclasses.replace(experiment.checkpoint, every=AFTER, keep_last=4),
    )


def test_eight_devices_then_three_then_one_then_eight(tmp_path: Path) -> None:
    """The batches are those of the straight run bit for bit (by their digests); losses stay within 1e-5 of it."""
    steps = 4 * AFTER
    run = tmp_path / "elastic"
    train(elastic_experiment(tmp_path, steps), tmp_path / "straight", quiet())
    # The first part is that of the straight run, as a kill right after its first checkpoint leaves it.
    shutil.copytree(tmp_path / "straight", run)
    for part in (2, 3, 4):
        shutil.rmtree(run / "checkpoints" / str(part * AFTER))
    for part, mesh in enumerate((MeshSpec(data=3), MeshSpec(data=1), MeshSpec(data=8)), 2):

        def onto(e: Experiment, part: int = part, mesh: MeshSpec = mesh) -> Experiment:
            return dataclasses.replace(e, mesh=mesh, train=dataclasses.replace(e.train, steps=part * AFTER))

        resume(run, onto, stream=quiet().stream)
    straight, elastic = read_metrics(tmp_path / "straight" / "metrics.jsonl"), read_metrics(run / "metrics.jsonl")
    assert len(straight) == len(elastic) == steps
    assert [line["digest_batch"] for line in elastic] == [line["digest_batch"] for line in straight]
    assert [line["loss"] for line in elastic] == pytest.approx([line["loss"] for line in straight], rel=1e-5)
    assert elastic[AFTER]["digest_params"] != straight[AFTER]["digest_params"]  # another order of additions, no more
