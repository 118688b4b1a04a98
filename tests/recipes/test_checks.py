"""Bad input at the door: each is refused with four parts, cross-field faults come all at once, nothing is lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxml.errors import ConfigError, DataError, DeviceError, JaxmlError
from jaxml.models.spec import ClassifierSpec
from jaxml.recipes.checks import check_experiment
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.train import train
from jaxml.tasks.spec import TextClassification
from jaxml.train.spec import ScheduleSpec
from tests.recipes.conftest import StraightRun, quiet
from tests.tiny import tiny_experiment


def replaced(experiment: Experiment, **parts: dict[str, object]) -> Experiment:
    new = {name: dataclasses.replace(getattr(experiment, name), **fields) for name, fields in parts.items()}
    return dataclasses.replace(experiment, **new)


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return tiny_experiment(tmp_path)


FIELDS = [
    (dict(train=dict(steps=0)), "train.steps"),
    (dict(train=dict(batch_size=6, accumulate=4)), "train.batch_size"),
    (dict(train=dict(eval_every=-1)), "train.eval_every"),
    (dict(data=dict(sequence_length=17)), "data.sequence_length"),
    (dict(data=dict(held_out=0.0)), "data.held_out"),
    (dict(data=dict(packing="single")), "data.packing"),
    (dict(model=dict(dropout=1.0)), "model.dropout"),
    (dict(model=dict(num_layers=0)), "model.num_layers"),
    (dict(model=dict(is_causal=False)), "model.is_causal"),
    (dict(task=dict(z_loss=-1.0)), "task.z_loss"),
    (dict(optimizer=dict(learning_rate=0.0)), "optimizer.learning_rate"),
    (dict(optimizer=dict(ema_decay=1.0)), "optimizer.ema_decay"),
    (dict(optimizer=dict(schedule=ScheduleSpec(warmup_steps=30))), "optimizer.schedule"),
    (dict(optimizer=dict(schedule=ScheduleSpec(total_steps=50))), "optimizer.schedule.total_steps"),
    (dict(checkpoint=dict(every=0)), "checkpoint.every"),
    (dict(checkpoint=dict(keep_best=1)), "checkpoint.keep_best"),
    (dict(guard=dict(spike_window=2)), "guard.spike_window"),
]


@pytest.mark.parametrize(("parts", "field"), FIELDS, ids=[field for _, field in FIELDS])
def test_a_field_that_cannot_be_right_is_named(experiment: Experiment, parts: dict, field: str) -> None:
    check_experiment(experiment, {})
    with pytest.raises(ConfigError) as caught:
        check_experiment(replaced(experiment, **parts), {})
    assert field in [fault.failed for fault in caught.value.faults]


def test_cross_field_faults_come_all_at_once(experiment: Experiment) -> None:
    wrong = replaced(experiment, train=dict(steps=0), data=dict(sequence_length=99), checkpoint=dict(every=0))
    with pytest.raises(ConfigError) as caught:
        check_experiment(wrong, {})
    failed = {fault.failed for fault in caught.value.faults}
    assert {"train.steps", "data.sequence_length", "checkpoint.every"} <= failed


def test_a_batch_that_the_devices_do_not_divide_is_refused_with_one_that_they_do(experiment: Experiment) -> None:
    with pytest.raises(ConfigError) as caught:
        check_experiment(replaced(experiment, train=dict(batch_size=12, accumulate=1)), {"data": 4, "fsdp": 2})
    assert "--train.batch-size 16" in caught.value.faults[0].todo


def test_a_task_with_the_wrong_model_is_refused(experiment: Experiment) -> None:
    task = TextClassification(labels=("ham", "spam"), positive_label="spma")
    with pytest.raises(ConfigError, match="ClassifierSpec"):
        check_experiment(dataclasses.replace(experiment, task=task), {})
    model = ClassifierSpec(experiment.model, num_classes=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        check_experiment(dataclasses.replace(experiment, task=task, model=model), {})
    failed = {fault.failed for fault in caught.value.faults}
    assert {"model.num_classes", "task.positive_label"} <= failed


def bad_run(tmp_path: Path, kind: str, experiment: Experiment) -> tuple[Experiment, type[JaxmlError]]:
    text = Path(experiment.data.sources[0].path)  # type: ignore[arg-type]
    match kind:
        case "empty text":
            text.write_text("")
        case "one-token documents":
            text.write_text("\n\n".join(["", "", ""]))
        case "invalid utf-8":
            text.write_bytes(b"good line\n\nbad \xff\xfe line\n")
        case "ids beyond the vocabulary":
            return replaced(experiment, model=dict(vocab_size=100)), DataError
        case "mesh larger than the devices":
            return replaced(experiment, mesh=dict(data=64), train=dict(batch_size=128)), DeviceError
        case "corrupted shard":
            from jaxml.recipes.preparing import prepare_data

            prepared = prepare_data(experiment)
            shard = max(prepared.directory.rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
            shard.write_bytes(shard.read_bytes()[:-7])
        case "stale fingerprint":
            from jaxml.recipes.preparing import prepare_data

            prepare_data(experiment)
            text.write_text(text.read_text() + "\n\nAnother paragraph.")
    return experiment, DataError


KINDS = ["empty text", "one-token documents", "invalid utf-8", "ids beyond the vocabulary"]
KINDS += ["mesh larger than the devices", "corrupted shard", "stale fingerprint"]


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_is_refused_before_the_first_step(kind: str, tmp_path: Path, experiment: Experiment) -> None:
    wrong, error = bad_run(tmp_path, kind, experiment)
    with pytest.raises(error) as caught:
        train(wrong, tmp_path / "run", quiet())
    for fault in caught.value.faults:
        assert all((fault.failed, fault.expected, fault.got, fault.todo))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_failed_background_save_is_raised_at_the_next_step_and_the_run_goes_on_from_the_one_before(
    straight: StraightRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxml.checkpoint.store import CheckpointStore
    from jaxml.errors import CheckpointError
    from jaxml.recipes.train import resume
    from tests.recipes.test_resume import assert_same_run

    real = CheckpointStore._write

    def full_disk(self, step, *rest):
        if step == 12:
            raise OSError(28, "No space left on device")
        return real(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "_write", full_disk)
        with pytest.raises(CheckpointError, match="No space left"):
            train(straight.experiment, tmp_path / "run", quiet())
    result = resume(tmp_path / "run", stream=quiet().stream)
    assert result.status == "finished"
    assert_same_run(tmp_path / "run", straight)
