"""A classifier's answers do not depend on what else is asked, and texts are prepared as training prepared them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxml.cli import predict as command
from jaxml.errors import CheckpointError, DataError, RequestError
from jaxml.infer.predict import Prediction, TextClassifier
from jaxml.tasks.build import build_task
from tests.infer.written import LABELS, ROW_LENGTH, write_classifier, write_language_model

TEXTS = [
    "free entry in a weekly competition",
    "ok",
    "see you at 7?",
    "x" * 100,
    "ünïcode ✓",
    "a",
    "b",
    "c",
    "d",
    "e",
    "f",
]


@pytest.fixture(autouse=True)
def _no_other_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command would keep its programs in the user's cache; the suite has its own."""
    monkeypatch.setattr("jaxml.devices.start.use_compilation_cache", lambda directory: None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def classifier(checkpoint: Path) -> TextClassifier:
    return TextClassifier.open(checkpoint, num_rows=4)


def test_a_text_gets_the_same_bits_alone_and_in_any_company(classifier: TextClassifier) -> None:
    alone = [classifier.predict([text])[0] for text in TEXTS]
    assert classifier.predict(TEXTS) == alone
    assert classifier.predict(TEXTS[::-1]) == alone[::-1]
    assert len({tuple(prediction.probabilities.values()) for prediction in alone}) == len(TEXTS), "they differ"


def test_probabilities_are_those_of_the_task_on_a_batch_of_training(classifier: TextClassifier) -> None:
    rows = [classifier.encode(text) for text in TEXTS[:4]]
    batch = jax.device_put(classifier._batch(rows) | {"label": np.zeros(4, np.int32), "is_valid": np.ones(4, bool)})
    opened, task = classifier._opened, build_task(classifier._opened.task)
    with jax.set_mesh(opened.mesh):
        evaluate = jax.jit(lambda params, batch: task.evaluate(opened.bound.bind(params), batch))
        _, outputs = evaluate(opened.params, batch)
    expected = np.exp(np.asarray(outputs["log_probs"], np.float64))
    got = np.array([list(prediction.probabilities.values()) for prediction in classifier.predict(TEXTS[:4])])
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_prediction_names_the_most_likely_of_the_manifests_labels(classifier: TextClassifier) -> None:
    for prediction in classifier.predict(TEXTS):
        assert tuple(prediction.probabilities) == LABELS
        assert prediction.label == max(prediction.probabilities, key=lambda name: prediction.probabilities[name])
        assert abs(sum(prediction.probabilities.values()) - 1) < 1e-12


def test_a_long_text_is_cut_or_refused_as_the_training_data_did(classifier: TextClassifier, tmp_path: Path) -> None:
    assert classifier.predict(["y" * 100]) == classifier.predict(["y" * ROW_LENGTH])
    refusing = TextClassifier.open(write_classifier(tmp_path, too_long="refuse"))
    # The end-of-text token is one of the row's.
    refusing.encode("y" * (ROW_LENGTH - 1))
    with pytest.raises(RequestError, match=r"text 1(.|\n)*at most 24 tokens(.|\n)*got: +25 tokens"):
        refusing.predict(["fine", "y" * ROW_LENGTH])


def test_what_cannot_be_a_row_is_refused(classifier: TextClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
    assert classifier.predict([]) == []
    assert classifier.predict([""])[0].label in LABELS, "the token that ends a text is there"
    with pytest.raises(RequestError, match="surrogate"):
        classifier.predict(["\ud800"])
    monkeypatch.setattr(classifier._tokenizer, "eos_id", None)
    with pytest.raises(RequestError, match="at least one token"):
        classifier.predict([""])


def test_a_language_model_and_a_checkpoint_without_tokenizer_are_no_classifiers(
    classifier: TextClassifier, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="text classifier"):
        TextClassifier.open(write_language_model(tmp_path))
    with pytest.raises(CheckpointError, match="without one"):
        TextClassifier(replace(classifier._opened, tokenizer=None))


def test_only_one_program_is_compiled_however_many_texts_there_are(classifier: TextClassifier) -> None:
    classifier.warm_up()
    before = classifier._compiled._cache_size()
    for count in (1, 3, 4, 5, 9):
        assert len(classifier.predict(TEXTS[:count])) == count
    assert classifier._compiled._cache_size() == before == 1


def test_the_command_takes_texts_and_files(checkpoint: Path, classifier: TextClassifier, tmp_path: Path) -> None:
    result, exit_code = command.main([str(checkpoint), "ok", "free entry", "--rows", "4"])
    assert exit_code == 0
    expected = classifier.predict(["ok", "free entry"])
    assert [Prediction(item["label"], item["probabilities"]) for item in result["results"]] == expected
    assert result["text"].splitlines()[0].startswith(expected[0].label)
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "ok"}\n\n"free entry"\n')
    assert command.main([str(checkpoint), str(file), "--rows", "4"])[0]["results"] == result["results"]
    assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize("line", ['{"other": 1}', "{", "3", '{"text": 3}'])
def test_a_line_that_holds_no_text_is_named(checkpoint: Path, tmp_path: Path, line: str) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(f'"fine"\n{line}\n')
    with pytest.raises(DataError, match="line 2"):
        command.main([str(checkpoint), str(file)])
