"""A float16 run, whole: overflows pass the guard, the loss scale is in the log and the checkpoint, and overflow for ever
stops with a report. The overflows are injected by a loss scale that is far too high."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from jaxml.checkpoint.compare import compare
from jaxml.errors import NonFiniteError
from jaxml.numerics.spec import LossScaleSpec, PrecisionSpec
from jaxml.observe.metrics_log import read_metrics
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.guarding import read_events
from jaxml.recipes.train import TrainResult, resume, train
from tests.recipes.conftest import STEPS, quiet, share_programs, small_experiment

TOO_HIGH = PrecisionSpec(compute="float16", loss_scale=LossScaleSpec(initial=2.0**24, growth_interval=4))


def float16_run(directory: Path, **guard: object) -> tuple[Experiment, Path]:
    experiment = small_experiment(directory)
    changed = dataclasses.replace(experiment.guard, **guard)
    return dataclasses.replace(experiment, precision=TOO_HIGH, guard=changed), directory / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainResult, Path]:
    """A float16 run that overflowed in its first steps."""
    experiment, run_dir = float16_run(tmp_path_factory.mktemp("float16"))
    with pytest.MonkeyPatch.context() as patch:
        share_programs(patch)
        return train(experiment, run_dir, quiet()), run_dir


def test_overflows_are_no_faults_and_their_scales_are_in_the_log(finished):
    result, run_dir = finished
    records = read_metrics(run_dir / "metrics.jsonl")
    skipped = [record["step"] for record in records if record["is_overflow"]]
    assert result.status == "finished"
    assert skipped[:2] == [1, 2]
    assert [record["loss_scale"] for record in records[:3]] == [2.0**24, 2.0**23, 2.0**22]
    assert records[-1]["skipped_updates"] == len(skipped) < STEPS / 2
    assert all(record["update_applied"] != record["is_overflow"] for record in records)
    assert read_events(run_dir / "faults") == []
    assert result.metrics["loss"] < records[0]["loss"]


def test_a_resumed_run_has_the_loss_scale_of_the_straight_one(finished, tmp_path):
    _, run_dir = finished
    resumed = tmp_path / "run"
    shutil.copytree(run_dir, resumed)
    # What a kill -9 in the last step leaves: the checkpoint of step 20 and the metrics to 23.
    shutil.rmtree(resumed / "checkpoints" / str(STEPS))
    lines = (resumed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (resumed / "metrics.jsonl").write_text("".join(lines[:-1]))
    resume(resumed, stream=quiet().stream)
    names = ("step", "loss", "grad_norm", "loss_scale", "skipped_updates", "skipped_in_a_row", "is_overflow")
    curves = [
        [[record[name] for name in names] for record in read_metrics(directory / "metrics.jsonl")]
        for directory in (run_dir, resumed)
    ]
    assert curves[0] == curves[1]
    assert compare(run_dir, resumed).is_same


def test_overflow_for_ever_stops_with_a_report_and_names_a_way_out(tmp_path):
    experiment, run_dir = float16_run(tmp_path, max_skips=1, on_nonfinite="skip")
    with pytest.raises(NonFiniteError) as caught:
        train(experiment, run_dir, quiet())
    fault = caught.value.faults[0]
    assert "overflowed float16 in 2 steps in a row, down to a loss scale of 8388608" in fault.got
    assert "gradient of" in fault.got
    assert "--precision.compute bfloat16" in fault.todo
    (event,) = read_events(run_dir / "faults")
    assert (event.step, event.action) == (2, "stop")
    assert Path(event.batch_file).exists()
    assert json.loads((run_dir / "run.json").read_text())["status"] == "failed"
