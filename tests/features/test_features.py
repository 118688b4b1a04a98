"""Every row of the feature table, through the ordinary recipe: trained, checkpointed, resumed, equal bit for bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxml.config.spec import from_json, to_json
from jaxml.infer.language_model import LanguageModel
from jaxml.inputs.spec import BpeTokenizerSpec
from jaxml.inputs.subword import train as train_subwords
from jaxml.observe.metrics_log import read_metrics
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.train import resume, train
from tests.features.table import ROWS, VERBS, markdown
from tests.recipes.conftest import quiet, share_programs, small_experiment

STEPS = 4
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _share_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    share_programs(monkeypatch)


def base_experiment(directory: Path) -> Experiment:
    experiment = small_experiment(directory)
    for source in experiment.data.sources:
        path = Path(str(source.path))
        records = [json.dumps({"text": line}) for line in path.read_text().splitlines() if line.strip()]
        path.with_suffix(".jsonl").write_text("\n".join(records))
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        path.with_suffix(".tsv").write_text("\n".join(lines))
        parquet.write_table(pyarrow.table({"text": lines}), path.with_suffix(".parquet"))
    words = train_subwords(BpeTokenizerSpec(vocab_size=257), [(directory / "a.txt").read_text() * 3])
    (directory / "tokenizer.json").write_bytes(words.files()["tokenizer.json"])
    return dataclasses.replace(
        experiment,
        train=dataclasses.replace(experiment.train, steps=STEPS, eval_every=2),
        optimizer=dataclasses.replace(experiment.optimizer, ema_decay=0.0),
        checkpoint=dataclasses.replace(experiment.checkpoint, every=2),
    )


def losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run_dir / "metrics.jsonl")]


@pytest.fixture(scope="module")
def base_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    directory = tmp_path_factory.mktemp("base")
    train(base_experiment(directory), directory / "run", quiet())
    return losses(directory / "run")


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_table_trains_and_resumes_bit_for_bit(name: str, tmp_path: Path, base_losses: list[float]) -> None:
    row = ROWS[name]
    experiment = row.change(base_experiment(tmp_path))
    assert from_json(to_json(experiment)) == experiment
    straight = train(experiment, tmp_path / "run", quiet(tensorboard=name == "sources"))
    measured = losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / str(STEPS))
    resumed = resume(tmp_path / "run", stream=quiet().stream)
    assert losses(tmp_path / "run") == measured
    assert resumed.metrics == straight.metrics
    assert_generates(tmp_path / "run")
    if row.is_same_maths:
        assert measured == pytest.approx(base_losses, rel=1e-5)
    elif name != "base":
        assert measured != pytest.approx(base_losses, rel=1e-6)


def assert_generates(run_dir: Path) -> None:
    """Greedy tokens of the checkpoint, through the cache, are those of one pass over prompt and answer."""
    model = LanguageModel.open(run_dir)
    (answer,) = model.generate([[5, 9, 3]], temperature=0.0, max_tokens=6, num_logprobs=0)
    opened = model.opened
    row = np.zeros((1, model.context_length), np.int32)
    row[0, : 3 + len(answer.tokens)] = [5, 9, 3, *answer.tokens]
    positions = np.arange(row.shape[1], dtype=np.int32)[None]

    @jax.jit
    def log_probs(params, *inputs):
        module = opened.bound.bind(params)
        return jax.nn.log_softmax(module.logits(module(*inputs)[0]))

    with jax.set_mesh(opened.mesh):
        whole = np.asarray(log_probs(opened.params, row, positions, np.ones_like(row)))[0]
    tolerance = 5e-2 if opened.described.precision.compute in ("bfloat16", "float16") else 1e-4
    for place, item in enumerate(answer.logprobs, 2):
        assert item.logprob == pytest.approx(whole[place, item.token], abs=tolerance)
        assert whole[place].max() - whole[place, item.token] < tolerance


@pytest.mark.parametrize(("file", "test"), [where for found in VERBS.values() for _, where in found])
def test_a_test_that_the_page_names_is_there(file: str, test: str) -> None:
    assert f"def {test}(" in (ROOT / "tests" / file).read_text()


def test_the_page_says_what_the_table_says() -> None:
    assert (ROOT / "docs" / "features.md").read_text() == markdown()
