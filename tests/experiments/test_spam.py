"""The comparison of experiments/spam.py: its numbers against loops and closed forms, and the whole of it in small."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.devices.spec import MeshSpec
from jaxml.inputs.spec import BpeTokenizerSpec
from jaxml.models.spec import AttentionSpec, BlockSpec, MlpSpec, RopeSpec
from jaxml.recipes.experiment import Experiment
from jaxml.train.spec import ScheduleSpec

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_MESSAGES = 200


def load(name: str) -> ModuleType:
    """An experiment file as a module; `experiments` is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location(f"experiment_{name}", ROOT / "experiments" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


spam = load("spam")

# Few distinct scores, so that ties between spam and ham are common.
scored = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=40).filter(
    lambda pairs: len({is_spam for _, is_spam in pairs}) == 2
)


@given(scored, st.sampled_from([0.0, 0.001, 0.1, 0.25, 0.5, 0.99]))
def test_recall_is_the_best_of_any_threshold_that_keeps_to_the_rate(pairs, rate):
    scores = np.array([score for score, _ in pairs], float)
    is_spam = np.array([flag for _, flag in pairs])
    best = 0.0
    for threshold in [-1.0, *scores]:
        caught = sum(flag and score > threshold for score, flag in pairs)
        alarms = sum(not flag and score > threshold for score, flag in pairs)
        if alarms <= rate * (~is_spam).sum():
            best = max(best, caught / is_spam.sum())
    assert spam.recall_at(rate, scores, is_spam) == best


def test_one_ham_in_a_thousand_may_be_a_false_alarm():
    is_spam = np.array([True, True, *[False] * 1000])
    scores = np.array([1.5, 0.5, 2.0, 1.0, *[0.0] * 998])
    assert spam.recall_at(0.001, scores, is_spam) == 0.5
    assert spam.recall_at(0.0, scores, is_spam) == 0.0
    assert spam.recall_at(0.002, scores, is_spam) == 1.0


def test_bootstrap_interval_of_accuracy_is_that_of_the_binomial():
    # Ours is always right, theirs in k of n: a resample differs by a binomial count over n.
    n, k = 400, 380
    is_spam = np.arange(n) % 3 == 0
    right = np.where(is_spam, 1.0, -1.0)
    theirs = np.where(np.arange(n) < k, right, -right)
    share = 1 - k / n
    mass = [math.comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(n + 1)]
    exact = [int(np.searchsorted(np.cumsum(mass), level)) / n for level in (0.025, 0.975)]
    got = spam.bootstrap_interval(spam.accuracy, right, theirs, is_spam, resamples=2000)
    assert got == pytest.approx(exact, abs=1.5 / n)


def test_bootstrap_pairs_the_two_and_is_seeded():
    generator = np.random.default_rng(3)
    is_spam = generator.random(100) < 0.4
    ours, theirs = generator.normal(size=(2, 100))
    assert spam.bootstrap_interval(spam.accuracy, ours, ours, is_spam, resamples=50) == (0.0, 0.0)
    first, again, other = (
        spam.bootstrap_interval(spam.accuracy, ours, theirs, is_spam, resamples=50, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("low", "high", "says"), [(0.1, 0.2, "jaxml wins"), (-0.2, -0.1, "the SVM wins"), (-0.1, 0.0, "no winner")]
)
def test_a_winner_is_named_only_when_the_interval_excludes_zero(low, high, says):
    assert spam.winner(low, high).startswith(says)


def small_experiment(directory: Path) -> Experiment:
    """The experiment on the first messages only, with one layer of width 8, for a few steps on one device."""
    lines = spam.MESSAGES.read_text(encoding="utf-8").split("\n")[:NUM_MESSAGES]
    (directory / "messages.tsv").write_text("\n".join(lines), encoding="utf-8")
    whole = spam.config()
    block = BlockSpec(AttentionSpec(num_heads=1, num_kv_heads=1, head_width=8, rope=RopeSpec()), MlpSpec(width=8))
    source = dataclasses.replace(whole.data.sources[0], path=str(directory / "messages.tsv"))
    decoder = dataclasses.replace(
        whole.model.decoder, vocab_size=400, width=8, num_layers=1, blocks=(block,), context_length=32
    )
    return dataclasses.replace(
        whole,
        model=dataclasses.replace(whole.model, decoder=decoder),
        data=dataclasses.replace(
            whole.data,
            tokenizer=BpeTokenizerSpec(400),
            sources=(source,),
            prepared=str(directory / "prepared"),
            sequence_length=32,
        ),
        train=dataclasses.replace(whole.train, steps=4, batch_size=8, eval_batch_size=16),
        optimizer=dataclasses.replace(whole.optimizer, schedule=ScheduleSpec("constant")),
        mesh=MeshSpec(data=1, fsdp=1),
    )


def test_a_few_steps_of_the_experiment_end_in_a_verdict_on_the_same_messages(tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn (extra `experiments`) is not installed", exc_type=ImportError)
    from jaxml.recipes.preparing import prepare_data
    from jaxml.recipes.train import TrainOptions, train

    experiment = small_experiment(tmp_path)
    result = train(experiment, tmp_path / "run", TrainOptions(stream=io.StringIO()))
    table = spam.compare(str(tmp_path / "run"))

    prepared = prepare_data(experiment)
    parts = [spam.messages(prepared, split) for split in ("train", "held_out")]
    lines = [line.split("\t") for line in (tmp_path / "messages.tsv").read_text(encoding="utf-8").split("\n")]
    seen = sorted(
        (spam.LABELS[int(flag)], text) for texts, flags in parts for text, flag in zip(texts, flags, strict=True)
    )
    assert seen == sorted((label, text) for label, text in lines)
    assert not set(parts[0][0]) & set(parts[1][0])

    shown = re.search(r"^accuracy +(\S+) +(\S+) +(\S+) \[(\S+), (\S+)\]$", table, re.MULTILINE)
    assert shown is not None
    ours, theirs, difference, low, high = (float(number) for number in shown.groups())
    assert ours == pytest.approx(result.metrics["eval_accuracy"], abs=1e-4)
    assert difference == pytest.approx(ours - theirs, abs=2e-4)
    assert low <= difference <= high
    scores = spam.svm_scores(*parts[0], parts[1][0])
    assert theirs == pytest.approx(np.mean((scores > 0) == parts[1][1]), abs=1e-4)
    verdict = table.splitlines()[-1]
    assert verdict.startswith("verdict: accuracy: ")
    assert "spam recall" in verdict


def test_without_scikit_learn_the_script_says_so_before_it_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert spam.main(["--run-dir", str(tmp_path / "run")]) == 1
    assert "jaxml[experiments]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
