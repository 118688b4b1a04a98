"""Laws of `jaxml blame`: a document's loss and gradient are its own, together they are the step's, the worst comes first."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml import trees
from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.cli.main import main
from jaxml.data.spec import JsonlSource, TextSource
from jaxml.errors import RunError
from jaxml.models.spec import ClassifierSpec
from jaxml.prove.blame import blame, loss_and_norm
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.train import train
from jaxml.tasks.spec import TextClassification
from jaxml.train.spec import TrainSpec
from tests.recipes.conftest import quiet
from tests.tiny import tiny_experiment, tiny_model
from tests.train import tiny

STEPS = 5


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Five steps of packed rows without dropout, so that what was logged is what the documents add up to."""
    directory = tmp_path_factory.mktemp("blame")
    experiment = tiny_experiment(directory)
    # A word a line: several to a row.
    (directory / "lines.txt").write_text("\n".join((directory / "text.txt").read_text().split()))
    experiment = dataclasses.replace(
        experiment,
        data=dataclasses.replace(
            experiment.data, sources=(TextSource(str(directory / "lines.txt"), documents="line"),), too_long="truncate"
        ),
        model=tiny_model(dropout=0.0),
        train=TrainSpec(steps=STEPS, batch_size=4, accumulate=2, eval_batches=1),
        checkpoint=CheckpointSpec(every=3),
    )
    train(experiment, directory / "run", quiet())
    return str(directory / "run")


@pytest.fixture(scope="module")
def classifier_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("blame_classifier")
    lines = [{"text": "ham and " * (n % 3) + f"eggs {n}", "label": "ham" if n % 2 else "spam"} for n in range(24)]
    (directory / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = tiny_experiment(directory)
    experiment = Experiment(
        name="classifier",
        model=ClassifierSpec(dataclasses.replace(tiny_model(dropout=0.0), is_causal=False), num_classes=2),
        task=TextClassification(("ham", "spam")),
        data=dataclasses.replace(
            base.data,
            sources=(JsonlSource(str(directory / "texts.jsonl"), label="label"),),
            packing="single",
            too_long="truncate",
        ),
        train=TrainSpec(steps=2, batch_size=4, eval_batches=1),
        mesh=base.mesh,
        checkpoint=CheckpointSpec(every=10),
    )
    train(experiment, directory / "run", quiet())
    return str(directory / "run")


def logged(run_dir: str, step: int) -> dict[str, float]:
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()][step - 1]


def test_losses_of_the_documents_weighted_by_their_tokens_are_that_of_the_step(run_dir):
    """At the exact parameters: those of step 4, taken again from the checkpoint of step 3."""
    found = blame(run_dir, STEPS)
    assert (found.at.step, found.at.checkpoint, found.at.num_replayed) == (4, 3, 1)
    weights = [piece.num_tokens for piece in found.pieces]
    mean = np.average([piece.loss for piece in found.pieces], weights=weights)
    assert sum(weights) == logged(run_dir, STEPS)["num_tokens"]
    assert mean == pytest.approx(logged(run_dir, STEPS)["loss"], rel=1e-6)
    losses = [piece.loss for piece in found.pieces]
    assert losses == sorted(losses, reverse=True)
    assert len(found.pieces) > 4, "rows are packed"


def test_far_from_a_checkpoint_its_own_parameters_are_used_and_named(run_dir):
    near, far = blame(run_dir, STEPS), blame(run_dir, STEPS, most_replayed=0)
    assert (far.at.step, far.at.checkpoint, far.at.num_replayed) == (3, 3, 0)
    assert {piece.document for piece in far.pieces} == {piece.document for piece in near.pieces}
    assert [piece.loss for piece in far.pieces] != [piece.loss for piece in near.pieces]


def test_the_command_shows_the_text_of_each_document(run_dir, capsys):
    assert main(["blame", run_dir, "--step", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["at"] == {"step": 0, "checkpoint": None, "num_replayed": 0}
    text = Path(run_dir).parent.joinpath("lines.txt").read_text()
    assert all(piece["text"].removesuffix("...") in text for piece in told["pieces"])
    assert main(["blame", run_dir, "--step", "1", "--top", "2"]) == 0
    shown = capsys.readouterr().out
    assert "the run's first state" in shown
    assert f"and {len(told['pieces']) - 2} more" in shown


def test_a_step_that_was_not_taken_is_refused(run_dir):
    with pytest.raises(RunError, match="from 1 to 5"):
        blame(run_dir, STEPS + 1)


def test_a_classifiers_rows_are_judged_one_by_one(classifier_dir):
    found = blame(classifier_dir, 2)
    assert len(found.pieces) == 4
    assert np.mean([piece.loss for piece in found.pieces]) == pytest.approx(logged(classifier_dir, 2)["loss"], rel=1e-6)
    assert {piece.label for piece in found.pieces} <= {"ham", "spam"}
    assert all(piece.grad_norm > 0 for piece in found.pieces)


@pytest.fixture
def measured() -> Iterator[tuple[dict, Callable[..., tuple[float, float]]]]:
    """(packed ragged rows, their measure in float64) on the tiny model of tests.train."""
    with jax.enable_x64(True):
        built = tiny.program()
        params = jax.tree.map(jnp.asarray, jax.device_get(tiny.state_of(built)["params"]))
        jitted = jax.jit(lambda *arguments: loss_and_norm(built.bound, built.task, *arguments))

        def measure(batch: dict, row: int, segment: int) -> tuple[float, float]:
            columns = {name: column for name, column in batch.items() if name not in ("record", "source")}
            loss, norm = jitted(params, columns, np.int32(row), np.int32(segment))
            return float(loss), float(norm)

        measure.params, measure.built = params, built  # type: ignore[attr-defined]
        yield tiny.language_batch(), measure


def test_a_documents_gradient_is_that_of_a_batch_of_it_alone(measured):
    batch, measure = measured
    built, params = measure.built, measure.params
    row = next(row for row in range(tiny.ROWS) if _counts(batch, row, 2))

    def alone(params):
        mask = np.zeros_like(batch["loss_mask"])
        mask[row] = batch["loss_mask"][row] & (batch["segment_ids"][row] == 2)
        columns = jax.tree.map(jnp.asarray, batch | {"loss_mask": mask})
        terms = built.task.loss(built.bound.bind(params), columns, None)
        return sum(term.coefficient * term.sum / term.weight for term in terms.values())

    gradients = trees.flatten(jax.jit(jax.grad(alone))(params))
    expected = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in gradients.values()))
    assert measure(batch, row, 2)[1] == pytest.approx(expected, rel=1e-9)


def test_neighbours_in_the_row_do_not_matter(measured):
    batch, measure = measured
    row = next(row for row in range(tiny.ROWS) if _counts(batch, row, 1) and _counts(batch, row, 2))
    other = {name: column.copy() for name, column in batch.items()}
    elsewhere = other["segment_ids"][row] != 1
    other["tokens"][row][elsewhere] = 3
    other["targets"][row][elsewhere] = 4
    assert measure(other, row, 1) == pytest.approx(measure(batch, row, 1), rel=1e-9)
    assert measure(other, row, 2) != pytest.approx(measure(batch, row, 2), rel=1e-3)


def _counts(batch: dict, row: int, segment: int) -> bool:
    return bool((batch["loss_mask"][row] & (batch["segment_ids"][row] == segment)).any())
