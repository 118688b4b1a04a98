"""Each fault that the guard is there for, injected: a poisoned document makes the loss NaN, or makes it spike."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxml.errors import NonFiniteError, SpikeError
from jaxml.observe.metrics_log import read_metrics
from jaxml.recipes import assemble as assemble_module
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.guarding import read_events
from jaxml.recipes.preparing import prepare_data
from jaxml.recipes.run_directory import RunDirectory, read_record
from jaxml.recipes.seen import open_run_data, seen_by
from jaxml.recipes.train import resume, train
from jaxml.tasks.contract import Task
from jaxml.tasks.spec import TaskSpec
from jaxml.train import step as step_module
from tests.recipes.conftest import quiet, small_experiment

NAN_BYTE, SPIKE_BYTE = 1, 2
STEPS = 20


@dataclasses.dataclass(frozen=True)
class PoisonedTask:
    """The real task, whose loss turns NaN on a batch with byte 1 and a thousandfold on a batch with byte 2."""

    task: Task

    @property
    def spec(self) -> TaskSpec:
        return self.task.spec

    @property
    def rows_interact(self) -> bool:
        return self.task.rows_interact

    def evaluate(self, model, batch):
        return self.task.evaluate(model, batch)

    def summarize(self, sums, rows):
        return self.task.summarize(sums, rows)

    def loss(self, model, batch, dropout_keys_B):
        terms = self.task.loss(model, batch, dropout_keys_B)
        factor = jnp.where(jnp.any(batch["tokens"] == SPIKE_BYTE), 1000.0, 1.0)
        factor = jnp.where(jnp.any(batch["tokens"] == NAN_BYTE), jnp.nan, factor)
        return {name: term._replace(sum=term.sum * factor) for name, term in terms.items()}

    def row_losses(self, model, batch):
        losses_B = self.task.row_losses(model, batch)
        return jnp.where(jnp.any(batch["tokens"] == NAN_BYTE, axis=1), jnp.nan, losses_B)


@cache
def poisoned_program(*specs):
    real = step_module.build_task
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "build_task", lambda *arguments: PoisonedTask(real(*arguments)))
        return step_module.build_program(*specs)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble_module, "build_program", poisoned_program)


def line(byte: int) -> str:
    """A document that fits into one row, so that no row without the byte belongs to it."""
    return f"poison {chr(byte)}."


def poisoned(directory: Path, byte: int, **guard: object) -> Experiment:
    """The small experiment with a poisoned line in its first source, met at step 10 or later, before the last step."""
    experiment = small_experiment(directory)
    text = directory / "a.txt"
    text.write_text(text.read_text() + f"\n{line(byte)}\n")
    experiment = dataclasses.replace(
        experiment,
        train=dataclasses.replace(experiment.train, steps=STEPS, eval_every=0),
        guard=dataclasses.replace(experiment.guard, **guard),
    )
    return poisoned_late(experiment, byte)


def test_stop_names_leaf_term_and_records_saves_the_batch_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    experiment = poisoned(tmp_path, NAN_BYTE, on_nonfinite="stop")
    with pytest.raises(NonFiniteError) as caught:
        train(experiment, tmp_path / "run", quiet())
    got = caught.value.faults[0].got
    assert "attention" in got or "embed" in got
    assert "loss term: loss" in got
    assert "record" in got
    event = read_events(tmp_path / "run" / "faults")[0]
    with np.load(event.batch_file) as batch:
        assert (batch["tokens"] == NAN_BYTE).any()
    assert any("a.txt" in place for place in event.documents)
    record = read_record(RunDirectory(tmp_path / "run"))
    assert record is not None
    assert (record.status, record.exit_code) == ("failed", 1)
    saved = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()]
    assert saved
    assert all(step < event.step for step in saved)


def test_skip_leaves_the_update_out_and_goes_on(tmp_path: Path) -> None:
    result = train(poisoned(tmp_path, NAN_BYTE, on_nonfinite="skip"), tmp_path / "run", quiet())
    assert result.status == "finished"
    records = {r["step"]: r for r in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    bad = [step for step, r in records.items() if not r["update_applied"]]
    assert bad
    assert bad == [event.step for event in read_events(tmp_path / "run" / "faults")]
    assert all(records[step]["loss"] is None and "loss" in records[step]["nonfinite"] for step in bad)
    assert np.isfinite(result.metrics["eval_loss"])


@pytest.mark.parametrize(
    ("byte", "guard"), [(NAN_BYTE, {}), (SPIKE_BYTE, {"spike_threshold": 20.0, "spike_window": 8})]
)
def test_rewind_goes_back_leaves_the_step_out_and_finishes_clean(tmp_path: Path, byte: int, guard: dict) -> None:
    experiment = poisoned(tmp_path, byte, on_nonfinite="rewind", **guard)
    result = train(experiment, tmp_path / "run", quiet())
    assert result.status == "finished"
    events = read_events(tmp_path / "run" / "faults")
    assert events
    assert all(event.action == "rewind" and event.documents for event in events)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert all(r["is_finite"] and r["loss"] < 10 for r in records)
    directory, prepared, batch_size = open_run_data(str(tmp_path / "run"))
    document = prepared.find_document(line(byte))[0]
    assert seen_by(directory, prepared, batch_size, document).steps == []
    assert str(events[0].data_step) in (tmp_path / "run" / "report.html").read_text()


def poisoned_late(experiment: Experiment, byte: int) -> Experiment:
    """The experiment with the first data seed that puts the poisoned line into training, at step 10 or later."""
    for seed in range(100):
        data = dataclasses.replace(experiment.data, seed=seed, prepared=f"{experiment.data.prepared}-{seed}")
        candidate = dataclasses.replace(experiment, data=data)
        prepared = prepare_data(candidate)
        batch_size = candidate.train.batch_size
        order = assemble_module.TrainBatches(prepared, batch_size).order
        rows = prepared.rows_of_document(prepared.find_document(line(byte))[0])
        steps = [
            step + 1 for split, s, r in rows if split == "train" for step in order.steps_of(s, r, 0, STEPS, batch_size)
        ]
        if steps and min(steps) >= 10:
            return candidate
    raise AssertionError("no seed puts the line late")


def test_a_run_killed_right_after_a_rewind_still_leaves_the_step_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = poisoned(tmp_path, NAN_BYTE, on_nonfinite="rewind")
    straight = train(experiment, tmp_path / "straight", quiet())

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("jaxml.recipes.running.Run._rewind", killed)
        with pytest.raises(Killed):
            train(experiment, tmp_path / "run", quiet())
    result = resume(tmp_path / "run", stream=quiet().stream)
    assert result.metrics == straight.metrics


def test_skips_in_a_row_are_limited(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="0 updates in a row were skipped"):
        train(poisoned(tmp_path, NAN_BYTE, on_nonfinite="skip", max_skips=0), tmp_path / "run", quiet())


def test_rewinds_are_limited(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="rewinds are used up"):
        train(poisoned(tmp_path, NAN_BYTE, on_nonfinite="rewind", max_rewinds=0), tmp_path / "run", quiet())


def test_a_spike_without_rewinds_stops(tmp_path: Path) -> None:
    experiment = poisoned(tmp_path, SPIKE_BYTE, spike_threshold=20.0, spike_window=8, max_rewinds=0)
    with pytest.raises(SpikeError):
        train(experiment, tmp_path / "run", quiet())
