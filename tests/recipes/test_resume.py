"""run(N) equals run(k), stop, resume, run(N - k), bit for bit; and what a start mode may and may not do."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxml.checkpoint.compare import compare, describe
from jaxml.errors import CheckpointError, ConfigError, JaxmlError, RunError
from jaxml.observe.metrics_log import read_metrics
from jaxml.recipes import preparing, running
from jaxml.recipes.evaluate import evaluate as real_evaluate
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.interruption import REQUEUE_EXIT_CODE, Interruption
from jaxml.recipes.run_directory import RunDirectory, RunLock, read_record
from jaxml.recipes.train import resume, train
from jaxml.train.loop import run_steps as real_run_steps
from jaxml.train.spec import ScheduleSpec
from tests.recipes.conftest import STEPS, StraightRun, quiet

NUMBERS = ("loss", "grad_norm", "learning_rate", "num_tokens", "eval_loss")


def curve(run_dir: Path) -> list[tuple]:
    """Every number of every step that is not a time."""
    return [(r["step"], *(r.get(name) for name in NUMBERS)) for r in read_metrics(run_dir / "metrics.jsonl")]


def assert_same_run(run_dir: Path, straight: StraightRun) -> None:
    assert curve(run_dir) == curve(straight.run_dir)
    difference = compare(straight.run_dir, run_dir)
    assert difference.is_same, difference


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deliver a SIGTERM while `step` is being handled."""

    def signalling(*arguments, **named):
        for event in real_run_steps(*arguments, **named):
            if event.step == step:
                signal.raise_signal(signal.SIGTERM)
            yield event

    monkeypatch.setattr(running, "run_steps", signalling)


def test_a_run_stopped_three_times_across_epochs_equals_the_straight_one(
    straight: StraightRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start, stop in zip(("fresh", "resume", "must-resume"), (3, 8, 17), strict=True):
        stop_at(stop, monkeypatch)
        result = train(straight.experiment, tmp_path / "run", quiet(start=start))
        assert (result.status, result.exit_code) == ("interrupted", REQUEUE_EXIT_CODE)
        # The loop is a step ahead when it hears of the signal, except at a hold.
        assert result.step in (stop, stop + 1)
    monkeypatch.setattr(running, "run_steps", real_run_steps)
    result = resume(tmp_path / "run", stream=quiet().stream)
    assert (result.status, result.step, result.exit_code) == ("finished", STEPS, 0)
    assert result.metrics["eval_loss"] == straight.result.metrics["eval_loss"]
    assert_same_run(tmp_path / "run", straight)


def test_records_say_what_the_automatic_precision_meant(straight: StraightRun) -> None:
    assert straight.experiment.precision.compute == "auto"
    record = read_record(RunDirectory(straight.run_dir))
    assert record is not None
    assert record.experiment["precision"]["compute"] == "float32"
    described = describe(straight.run_dir)
    assert described.manifest.experiment["precision"]["compute"] == "float32"
    assert described.manifest.probe["compute"] == "float32"


def test_a_run_killed_between_checkpoints_takes_the_lost_steps_again_and_its_curve_does_not_fork(
    straight: StraightRun, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(straight.run_dir, run_dir)
    # What a kill -9 after step 23 leaves: checkpoints 16 and 20, metrics to 23 and a torn line.
    shutil.rmtree(run_dir / "checkpoints" / str(STEPS))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])
    resume(run_dir, stream=quiet().stream)
    assert_same_run(run_dir, straight)


@pytest.mark.parametrize("moment", ["compile", "evaluation", "save"])
def test_a_signal_at_any_moment_saves_and_the_resumed_run_is_the_same(
    moment: str, straight: StraightRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {
        "compile": ("jaxml.train.step.Program.compile", 0),
        "evaluation": ("jaxml.recipes.running.evaluate", 8),
        "save": ("jaxml.checkpoint.store.CheckpointStore.save", 4),
    }
    target, step = places[moment]
    with monkeypatch.context() as patch:
        module, _, name = target.rpartition(".")
        owner = __import__(module, fromlist=["_"]) if module.islower() else None
        if owner is None:
            parent, _, class_name = module.rpartition(".")
            owner = getattr(__import__(parent, fromlist=["_"]), class_name)
        real = getattr(owner, name)

        def signalling(*arguments, **named):
            signal.raise_signal(signal.SIGINT)
            patch.setattr(owner, name, real)
            return real(*arguments, **named)

        patch.setattr(owner, name, signalling)
        result = train(straight.experiment, tmp_path / "run", quiet())
    assert (result.status, result.step, result.exit_code) == ("interrupted", step, REQUEUE_EXIT_CODE)
    record = read_record(RunDirectory(tmp_path / "run"))
    assert record is not None
    assert (record.status, record.exit_code) == ("interrupted", REQUEUE_EXIT_CODE)
    assert (tmp_path / "run" / "checkpoints" / str(step)).is_dir()
    resume(tmp_path / "run", stream=quiet().stream)
    assert_same_run(tmp_path / "run", straight)


def test_a_signal_in_the_last_evaluation_leaves_it_to_the_resumed_run(
    straight: StraightRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def signalling(assembly, params, poll):
        if len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == STEPS - 1:
            signal.raise_signal(signal.SIGTERM)
        return real_evaluate(assembly, params, poll)

    with monkeypatch.context() as patch:
        patch.setattr(running, "evaluate", signalling)
        result = train(straight.experiment, tmp_path / "run", quiet())
        assert (result.step, result.exit_code) == (STEPS, REQUEUE_EXIT_CODE)
    result = resume(tmp_path / "run", stream=quiet().stream)
    assert result.metrics == straight.result.metrics
    assert_same_run(tmp_path / "run", straight)


def test_a_signal_while_data_is_prepared_leaves_nothing_half_done(
    straight: StraightRun, tmp_path: Path, change, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = change(data=dict(prepared=str(tmp_path / "prepared")))

    real = preparing.prepare

    def signalling(*arguments, progress, **named):
        def tell(where):
            if where.stage == "tokenise":
                signal.raise_signal(signal.SIGTERM)
            progress(where)

        return real(*arguments, progress=tell, **named)

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "prepare", signalling)
        result = train(experiment, tmp_path / "run", quiet())
    assert (result.status, result.step) == ("interrupted", 0)
    assert resume(tmp_path / "run", stream=quiet().stream).status == "finished"
    assert curve(tmp_path / "run") == curve(straight.run_dir)


def test_a_second_signal_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = []
    monkeypatch.setattr("jaxml.recipes.interruption.os._exit", codes.append)
    before = signal.getsignal(signal.SIGTERM)
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert interruption.poll()
        assert codes == []
        signal.raise_signal(signal.SIGINT)
    assert codes == [128 + signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before


def test_resume_without_a_complete_checkpoint_starts_at_step_0_and_says_so(
    straight: StraightRun, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(straight.run_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints")
    with (tmp_path / "said").open("w") as stream:
        resume(run_dir, stream=stream)
    assert "resume: at step 0 (no complete checkpoint was found)" in (tmp_path / "said").read_text()
    assert_same_run(run_dir, straight)


def refused(error: type[JaxmlError], call: Callable[[], object]) -> JaxmlError:
    """The error of a call, which must have four parts."""
    with pytest.raises(error) as caught:
        call()
    for fault in caught.value.faults:
        assert all((fault.failed, fault.expected, fault.got, fault.todo))
    return caught.value


def test_start_modes_refuse_what_does_not_fit(straight: StraightRun, tmp_path: Path) -> None:
    experiment = straight.experiment
    error = refused(RunError, lambda: train(experiment, straight.run_dir, quiet()))
    assert "resume" in error.faults[0].todo
    refused(RunError, lambda: train(experiment, tmp_path / "none", quiet(start="must-resume")))
    refused(RunError, lambda: resume(tmp_path / "nothing"))
    nothing = str(tmp_path / "nothing")
    refused(
        CheckpointError,
        lambda: train(experiment, tmp_path / "b", quiet(start="initialise-from", initialise_from=nothing)),
    )


def test_a_resumed_run_may_not_change_what_decides_its_numbers(straight: StraightRun, change) -> None:
    for parts in (
        dict(optimizer=dict(learning_rate=1.0)),
        dict(train=dict(seed=5)),
        dict(data=dict(packing="concatenate")),
    ):
        error = refused(
            RunError, lambda parts=parts: resume(straight.run_dir, lambda _: change(**parts), stream=quiet().stream)
        )
        name = next(iter(next(iter(parts.values()))))
        assert name in error.faults[0].got


def test_initialise_from_takes_parameters_only(straight: StraightRun, tmp_path: Path, change) -> None:
    experiment = change(train=dict(steps=1), optimizer=dict(schedule=ScheduleSpec()))
    options = quiet(start="initialise-from", initialise_from=str(straight.run_dir))
    result = train(experiment, tmp_path / "run", options)
    first = read_metrics(straight.run_dir / "metrics.jsonl")[0]["loss"]
    assert result.step == 1
    assert result.metrics["loss"] < first


def test_all_parts_of_a_checkpoint_go_on_as_the_run_itself_would(straight: StraightRun, tmp_path: Path) -> None:
    """Parameters, optimizer and step, taken alone by name: the curve after step 16 is that of the straight run."""
    shutil.copytree(straight.run_dir, tmp_path / "copy")
    for step in (20, 24):
        shutil.rmtree(tmp_path / "copy" / "checkpoints" / str(step))
    parts = ("params", "opt_state", "step")
    options = quiet(start="initialise-from", initialise_from=str(tmp_path / "copy"), parts=parts)
    train(straight.experiment, tmp_path / "run", options)
    first, *steps = curve(tmp_path / "run")
    assert first[0] == 16  # the evaluation of what was taken
    assert steps == curve(straight.run_dir)[16:]
    assert read_record(RunDirectory(tmp_path / "run")).initialise_from.parts == parts


@pytest.mark.parametrize("part", ["opt_state", "step"])
def test_one_part_alone_is_taken_and_the_others_are_not(straight: StraightRun, tmp_path: Path, change, part) -> None:
    experiment = change(train=dict(steps=STEPS + 1))
    options = quiet(start="initialise-from", initialise_from=str(straight.run_dir), parts=(part,))
    train(experiment, tmp_path / "run", options)
    found, fresh = curve(tmp_path / "run"), curve(straight.run_dir)
    if part == "step":  # another batch and rate, and parameters that were never trained
        assert [line[0] for line in found] == [STEPS, STEPS + 1]
        assert found[1][1] > fresh[-1][1] + 0.1
    else:  # the same first loss, and from then on other updates
        assert found[0] == fresh[0]
        assert found[2][1] != fresh[2][1]


def test_a_run_from_other_parameters_keeps_its_origin_when_it_is_stopped_before_its_first_checkpoint(
    straight: StraightRun, tmp_path: Path, change, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = change(train=dict(steps=3), optimizer=dict(schedule=ScheduleSpec()))
    options = quiet(start="initialise-from", initialise_from=str(straight.run_dir))
    train(experiment, tmp_path / "straight", options)

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(running.Run, "_after_step", killed)
        with pytest.raises(Killed):
            train(experiment, tmp_path / "run", options)
    resume(tmp_path / "run", stream=quiet().stream)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")


def test_a_start_that_fails_before_its_first_step_leaves_the_record_as_it_was(
    straight: StraightRun, tmp_path: Path, change
) -> None:
    refused(ConfigError, lambda: train(change(checkpoint=dict(every=0)), tmp_path / "run", quiet()))
    nothing = quiet(start="initialise-from", initialise_from=str(tmp_path))
    refused(CheckpointError, lambda: train(straight.experiment, tmp_path / "run", nothing))
    assert not (tmp_path / "run" / "run.json").exists()
    before = (straight.run_dir / "run.json").read_bytes()
    wrong = change(checkpoint=dict(every=0))
    refused(ConfigError, lambda: resume(straight.run_dir, lambda _: wrong, stream=quiet().stream))
    fewer = change(train=dict(steps=20))
    error = refused(RunError, lambda: resume(straight.run_dir, lambda _: fewer, stream=quiet().stream))
    assert "train.steps" in error.faults[0].failed
    assert (straight.run_dir / "run.json").read_bytes() == before


def test_a_run_does_not_go_on_over_other_data(straight: StraightRun, tmp_path: Path, change) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(straight.run_dir, run_dir)
    other = tmp_path / "other.txt"
    other.write_text(Path(straight.experiment.data.sources[0].path).read_text()[:-30] + "\nAnother line of the play.")
    sources = tuple(dataclasses.replace(s, path=str(other)) for s in straight.experiment.data.sources)
    elsewhere = change(data=dict(sources=sources, prepared=str(tmp_path / "prepared")))
    error = refused(CheckpointError, lambda: resume(run_dir, lambda _: elsewhere, stream=quiet().stream))
    assert "data" in error.faults[0].failed


def test_the_manifest_holds_what_was_measured_at_its_own_step(straight: StraightRun) -> None:
    measured = {step: describe(straight.run_dir / "checkpoints" / str(step)).manifest.metrics for step in (16, 20, 24)}
    logged = {r["step"]: r for r in read_metrics(straight.run_dir / "metrics.jsonl")}
    assert set(measured[20]) == {"loss"}
    for step in (16, 24):
        assert measured[step]["eval_loss"] == logged[step]["eval_loss"]


def test_a_reader_that_leaves_does_not_end_the_run(straight: StraightRun, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w", buffering=1) as stream:
        result = train(straight.experiment, tmp_path / "run", dataclasses.replace(quiet(), stream=stream))
        assert result.status == "finished"
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(straight: StraightRun, tmp_path: Path) -> None:
    model = dataclasses.replace(straight.experiment.model, width=24)
    wider = dataclasses.replace(straight.experiment, model=model)
    options = quiet(start="initialise-from", initialise_from=str(straight.run_dir))
    error = refused(CheckpointError, lambda: train(wider, tmp_path / "run", options))
    assert any("embed.table" in fault.failed for fault in error.faults)


def test_two_processes_cannot_train_in_one_directory(straight: StraightRun, tmp_path: Path) -> None:
    with RunLock(RunDirectory(tmp_path)):
        refused(RunError, lambda: train(straight.experiment, tmp_path, quiet()))


def test_a_run_on_eight_devices_goes_on_on_one(straight: StraightRun, tmp_path: Path, change) -> None:
    sharded = change(mesh=dict(data=2, fsdp=4), train=dict(batch_size=16), checkpoint=dict(every=8))
    single = dataclasses.replace(sharded, mesh=straight.experiment.mesh)
    train(single, tmp_path / "single", quiet())
    train(
        dataclasses.replace(sharded, train=dataclasses.replace(sharded.train, steps=STEPS)), tmp_path / "run", quiet()
    )
    shutil.rmtree(tmp_path / "run" / "checkpoints" / str(STEPS))
    resume(tmp_path / "run", lambda e: dataclasses.replace(e, mesh=straight.experiment.mesh), stream=quiet().stream)
    pairs = zip(curve(tmp_path / "run"), curve(tmp_path / "single"), strict=True)
    for here, there in pairs:
        assert here[1] == pytest.approx(there[1], rel=1e-5)


def test_the_run_directory_tells_the_whole_story(straight: StraightRun) -> None:
    record = json.loads((straight.run_dir / "run.json").read_text())
    assert (record["status"], record["exit_code"], len(record["lineage"])) == ("finished", 0, 1)
    assert sum(straight.result.clock_s.values()) == pytest.approx(sum(record["clock_s"].values()), rel=0.05)
    report = (straight.run_dir / "report.html").read_text()
    assert "<svg" in report
    assert "http://" not in report.replace("http://www.w3.org", "")
    records = read_metrics(straight.run_dir / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert [r["step"] for r in records if "eval_loss" in r] == [8, 16, 24]
    assert all(r["data_wait_s"] >= 0 and r["tokens_per_s"] > 0 for r in records)


def test_experiments_are_hashable_so_that_programs_can_be_shared(straight: StraightRun) -> None:
    experiment: Experiment = straight.experiment
    assert hash(experiment) == hash(dataclasses.replace(experiment))
