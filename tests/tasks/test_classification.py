"""Weighted cross entropy, counts and the confusion matrix against NumPy, on rows of which some are padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml.errors import DataError
from jaxml.tasks.build import build_task
from jaxml.tasks.classification import TextClassificationTask
from jaxml.tasks.spec import TextClassification

WEIGHTS = (1.0, 2.5, 0.5)


@dataclass
class LogitModel:
    """The class logits of each row are the row of `params` that its first token names."""

    params: Any

    def __call__(self, tokens_BT, positions_BT, segment_ids_BT, dropout_keys_B=None):
        return self.params[tokens_BT[:, 0]], {}


def draw(rows: int, seed: int = 0, num_classes: int = 3) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    tokens = np.arange(rows, dtype=np.int32)[:, None]
    is_valid = rng.random(rows) < 0.7
    label = np.where(is_valid, rng.integers(0, num_classes, rows), -1).astype(np.int32)
    batch = {"tokens": tokens, "positions": tokens, "segment_ids": tokens, "label": label, "is_valid": is_valid}
    return rng.standard_normal((rows, num_classes)), batch


def task_of(**fields: Any) -> TextClassificationTask:
    task = build_task(TextClassification(("a", "b", "c"), **fields))
    assert isinstance(task, TextClassificationTask)
    return task


def on_device(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(column) for name, column in batch.items()}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.usefixtures("float64")
def test_loss_is_the_weighted_mean_over_valid_rows():
    logits, batch = draw(23)
    terms = jax.jit(lambda p, b: task_of(class_weights=WEIGHTS).loss(LogitModel(p), b, None))(logits, on_device(batch))
    valid = batch["is_valid"]
    labels = batch["label"][valid]
    weights = np.array(WEIGHTS)[labels]
    nll = -log_softmax(logits)[valid, labels]
    assert list(terms) == ["loss"]
    assert terms["loss"].sum == pytest.approx((weights * nll).sum(), rel=1e-12)
    assert terms["loss"].weight == pytest.approx(weights.sum(), rel=1e-12)


@pytest.mark.usefixtures("float64")
def test_sums_of_batches_of_a_prime_number_of_rows_are_exact():
    """23 rows in batches of 8 and one row more of padding: counts, confusion and scores as if there were no batches."""
    task = task_of(class_weights=WEIGHTS, positive_label="b")
    logits, batch = draw(23)
    evaluate = jax.jit(lambda p, b: task.evaluate(LogitModel(p), b))
    sums, rows = None, []
    for first in range(0, 24, 8):
        part = {
            n: np.pad(c[first : first + 8], ((0, max(0, first + 8 - 23)),) + ((0, 0),) * (c.ndim - 1))
            for n, c in batch.items()
        }
        part_sums, part_rows = jax.device_get(evaluate(logits, part))
        sums = part_sums if sums is None else jax.tree.map(np.add, sums, part_sums)
        rows.append(part_rows)
    outputs = {name: np.concatenate([part[name] for part in rows]) for name in rows[0]}
    valid = batch["is_valid"]
    labels, log_probs = batch["label"][valid], log_softmax(logits)[valid]
    predicted = log_probs.argmax(axis=1)
    confusion = np.zeros((3, 3), int)
    np.add.at(confusion, (labels, predicted), 1)
    assert np.array_equal(sums["confusion"], confusion)
    assert (sums["num_rows"], sums["correct"]) == (valid.sum(), (labels == predicted).sum())
    assert sums["confusion"].dtype == np.int32
    assert np.allclose(outputs["log_probs"][outputs["is_valid"]], log_probs, rtol=1e-12)
    metrics = task.summarize(sums, outputs)
    weights = np.array(WEIGHTS)[labels]
    assert metrics["eval_loss"] == pytest.approx(
        (weights * -log_probs[np.arange(len(labels)), labels]).sum() / weights.sum()
    )
    assert metrics["accuracy"] == (labels == predicted).mean()
    assert metrics["num_rows"] == valid.sum()
    assert metrics["precision"] == (labels[predicted == 1] == 1).mean()
    assert metrics["recall"] == (predicted[labels == 1] == 1).mean()
    odds = log_probs[:, 1] - np.log(np.exp(log_probs[:, 0]) + np.exp(log_probs[:, 2]))
    pairs = [(p > n) + 0.5 * (p == n) for p in odds[labels == 1] for n in odds[labels != 1]]
    assert metrics["roc_auc"] == pytest.approx(np.mean(pairs), rel=1e-12)


def test_an_undefined_metric_is_left_out():
    task = task_of(positive_label="b")
    confusion = np.array([[4, 0, 0], [0, 0, 0], [0, 0, 0]])
    sums = {
        "nll": np.float32(2),
        "weight": np.float32(4),
        "correct": np.int32(4),
        "num_rows": np.int32(4),
        "confusion": confusion,
    }
    rows = {"log_probs": np.full((4, 3), -1.1), "label": np.zeros(4, int), "is_valid": np.ones(4, bool)}
    assert task.summarize(sums, rows) == {"num_rows": 4, "eval_loss": 0.5, "accuracy": 1.0}
    nothing = {name: np.zeros_like(value) for name, value in sums.items()}
    assert task.summarize(nothing, {name: value[:0] for name, value in rows.items()}) == {"num_rows": 0}


def test_padding_that_is_not_finite_stays_out_of_sums_and_gradients():
    logits, batch = draw(8)
    logits = np.where(batch["is_valid"][:, None], logits, 1e30).astype(np.float32)

    def total(logits):
        return task_of().loss(LogitModel(logits), on_device(batch), None)["loss"].sum

    value, gradient = jax.jit(jax.value_and_grad(total))(logits)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))
    assert not np.any(np.asarray(gradient)[~batch["is_valid"]])


def test_rows_are_blamed_by_their_own_loss_and_masks_are_bool():
    logits, batch = draw(8)
    batch["is_valid"][:] = True
    logits[3] = np.nan
    losses = jax.jit(lambda p, b: task_of().row_losses(LogitModel(p), b))(logits.astype(np.float32), on_device(batch))
    assert np.flatnonzero(~np.isfinite(losses)).tolist() == [3]
    with pytest.raises(DataError, match="is_valid"):
        task_of().loss(LogitModel(jnp.asarray(logits)), on_device(batch | {"is_valid": np.ones(8, np.int32)}), None)
