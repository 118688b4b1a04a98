"""Every row of the feature table, through the ordinary recipe: trained, checkpointed, resumed, equal bit for bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from jaxml.config.spec import from_json, to_json
from jaxml.inputs.spec import BpeTokenizerSpec
from jaxml.inputs.subword import train as train_subwords
from jaxml.observe.metrics_log import read_metrics
from jaxml.recipes import assemble as assemble_module
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.train import resume, train
from tests.features.table import ROWS, markdown
from tests.recipes.conftest import quiet, shared_program, small_experiment

STEPS = 4
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _share_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble_module, "build_program", shared_program)


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
    if row.is_same_maths:
        assert measured == pytest.approx(base_losses, rel=1e-5)
    elif name != "base":
        assert measured[-1] != pytest.approx(base_losses[-1], rel=1e-6)


def test_the_page_says_what_the_table_says() -> None:
    assert (ROOT / "docs" / "features.md").read_text() == markdown()
