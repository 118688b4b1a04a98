"""Laws of `jaxml diverge`: equal runs are equal, and of two that are not the first cause is named, not a later one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxml.cli.main import main
from jaxml.data.batches import TrainBatches
from jaxml.errors import RunError
from jaxml.models.spec import RopeSpec
from jaxml.prove.diverge import Divergence, Parted, diverge, first_parted, other_rows
from jaxml.prove.replay import open_past_run, state_at
from jaxml.prove.rerun import Step64, first_apart
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.train import train
from jaxml.train.digest import DIGESTS, digest, to_hex
from jaxml.train.spec import TrainSpec
from tests.recipes.conftest import quiet, share_programs
from tests.tiny import tiny_experiment

STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def _share_programs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        share_programs(patch)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Trains a variant of the tiny experiment, once each: run(train=dict(seed=1)) is a directory."""
    directory = tmp_path_factory.mktemp("diverge")
    base = tiny_experiment(directory)
    base = dataclasses.replace(
        base,
        train=TrainSpec(steps=STEPS, batch_size=4, accumulate=2, eval_batches=1, digests=True),
        checkpoint=dataclasses.replace(base.checkpoint, every=2, keep_last=5),
    )
    made: dict[str, str] = {}

    def trained(change: Callable[[Experiment], Experiment] = lambda e: e, **parts: dict[str, Any]) -> str:
        changed = {name: dataclasses.replace(getattr(base, name), **fields) for name, fields in parts.items()}
        experiment = change(dataclasses.replace(base, **changed))
        key = repr(experiment)
        if key not in made:
            made[key] = str(directory / f"run{len(made)}")
            train(experiment, made[key], quiet())
        return made[key]

    return trained


def with_rope(experiment: Experiment) -> Experiment:
    """The same parameters, other mathematics in every layer's queries and keys."""
    block = experiment.model.blocks[0]
    attention = dataclasses.replace(block.attention, rope=RopeSpec(base=9_000.0))
    return dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, blocks=(dataclasses.replace(block, attention=attention),)),
    )


def records(run_dir: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


def test_a_run_logs_the_digests_of_every_step(run):
    for record in records(run()):
        assert all(len(record[name]) == 16 and int(record[name], 16) >= 0 for name in DIGESTS)


def test_equal_runs_are_equal_and_the_exit_code_says_so(run, tmp_path, capsys):
    again = str(tmp_path / "again")
    shutil.copytree(run(), again)
    assert main(["diverge", run(), again, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["is_equal"]
    assert (told["by"], told["first_step"], told["last_step"]) == ("digests", 1, STEPS)


def test_other_records_are_named_with_their_documents(run):
    prepared = str(Path(run()).parent / "prepared_again")
    found = diverge(run(), run(data={"seed": 1, "prepared": prepared}))
    assert found.parted == Parted(1, "batch")
    assert found.rows
    assert all(row.records[0] != row.records[1] for row in found.rows)
    assert all("text.txt" in place for row in found.rows for documents in row.documents for place in documents)
    assert not found.reruns


def test_rows_that_one_batch_does_not_have_are_other_rows(run):
    whole = open_past_run(run())
    half = dataclasses.replace(whole, batches=TrainBatches(whole.assembly.prepared, 2))
    found = other_rows(whole, half, 1)
    assert [len(row.records[1]) for row in found] == [2, 2, 0, 0]
    assert [bool(row.documents[1]) for row in found] == [True, True, False, False]
    assert other_rows(whole, whole, 1) == ()


def test_another_seed_is_another_first_state(run):
    found = diverge(run(), run(train={"seed": 1}))
    assert found.parted == Parted(1, "gradients")
    assert found.first_state[0].path.startswith("params.")
    assert [field.path for field in found.fields] == ["train.seed"]


def test_another_layout_is_rounding_alone(run, capsys):
    other = run(mesh={"data": 2})
    found = diverge(run(), other)
    assert found.parted is not None
    assert found.parted.part == "gradients"
    assert [rerun.parting for rerun in found.reruns] == [None]
    assert found.reruns[0].error < 1e-12
    assert main(["diverge", run(), other]) == 1
    assert "by rounding alone" in capsys.readouterr().out


def test_the_first_value_that_is_made_otherwise_is_named_with_its_layer_and_file(run):
    """Of scanned layers as of unrolled ones."""
    found = diverge(run(execution={"layers": "scanned"}), run(with_rope))
    parting = found.reruns[0].parting
    assert parting is not None
    assert parting.name == "query, layer 0"
    assert parting.made_by.startswith("jaxml/models/")


def test_another_update_rule_parts_at_the_parameters_alone(run):
    found = diverge(run(), run(optimizer={"weight_decay": 0.2}))
    assert found.parted is not None
    assert found.parted.part == "params"
    parting = found.reruns[0].parting
    assert parting is not None
    assert parting.name.startswith("parameters of ")


def test_without_digests_losses_tell_and_the_step_before_is_looked_at(run, tmp_path):
    """The update of step n differs; the first loss that shows it is that of step n + 1."""
    bare = tmp_path / "bare"
    shutil.copytree(run(), bare)
    lines = [{name: value for name, value in line.items() if name not in DIGESTS} for line in records(run())]
    (bare / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = diverge(str(bare), run(optimizer={"weight_decay": 0.2}))
    assert found.by == "losses"
    assert "no digests" in found.notes[0]
    assert found.parted is not None
    assert found.reruns[0].step == found.parted.step - 1
    assert found.reruns[0].parting is not None
    assert found.reruns[0].parting.name.startswith("parameters of ")


@pytest.mark.parametrize("step", [0, 1, 4, 5])
def test_any_state_of_a_run_comes_back_bit_for_bit(run, step):
    """Before the first checkpoint, at one, and after one."""
    past = open_past_run(run())
    state, place = state_at(past, step)
    assert (place.step, place.checkpoint, place.num_replayed) == (
        step,
        *{0: (None, 0), 1: (None, 1), 4: (4, 0), 5: (5, 0)}[step],
    )
    if step > 0:
        assert to_hex(np.asarray(jax.jit(digest)(state["params"]))) == past.records[step]["digest_params"]


def test_runs_without_a_common_step_are_refused(run, tmp_path):
    late = tmp_path / "late"
    shutil.copytree(run(), late)
    lines = Path(run(), "metrics.jsonl").read_text().splitlines()
    (late / "metrics.jsonl").write_text("\n".join(lines[3:]) + "\n")
    early = tmp_path / "early"
    shutil.copytree(run(), early)
    (early / "metrics.jsonl").write_text("\n".join(lines[:3]) + "\n")
    with pytest.raises(RunError, match="a step in common"):
        diverge(str(early), str(late))


def test_the_earliest_step_and_in_it_the_earliest_part_count():
    parts = {"x": "first", "y": "second"}
    assert first_parted({1: {"x": 1, "y": 1}}, {1: {"x": 2, "y": 2}}, parts) == Parted(1, "first")
    assert first_parted({1: {"x": 1, "y": 1}, 2: {"x": 3}}, {1: {"x": 1, "y": 2}, 2: {"x": 4}}, parts) == Parted(
        1, "second"
    )
    assert first_parted({1: {"x": 1}}, {2: {"x": 2}}, parts) is None


def test_rounding_is_not_a_difference_and_a_gradient_of_rounding_decides_nothing():
    def step(shift: float, noise: float, update: float) -> Step64:
        parts = {
            "values": {"query, layer 0": np.array([1.0 + shift, -2.0])},
            "gradient": {"w": np.array([1.0]), "bias": np.array([noise])},
            "parameters": {"w": np.array([1.0]), "bias": np.array([update])},
        }
        return Step64(parts, {"query, layer 0": "f.py"})

    same, _, _ = first_apart(step(0, 1e-18, 0.1), step(1e-15, 1e-18, 0.1))
    assert same is None
    # The bias' gradient is zero but for rounding, and Adam makes a whole step of its sign.
    noise, _, num_left_out = first_apart(step(0, 1e-18, 0.1), step(0, -1e-18, -0.1))
    assert noise is None
    assert num_left_out == 1
    parting, error, _ = first_apart(step(0, 1e-3, 0.1), step(1e-6, -1e-3, -0.1))
    assert parting is not None
    assert (parting.name, parting.made_by) == ("query, layer 0", "f.py")
    assert error == pytest.approx(2.0)


def test_a_verdict_is_one_line():
    assert Divergence("digests", 1, 5, (), None).verdict == "equal in steps 1 to 5, by digests"
    assert "\n" not in Divergence("losses", 1, 5, (), Parted(2, "loss")).verdict
