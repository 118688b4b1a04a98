"""One label a record: weighted cross entropy, exact counts, and the scores of each row for ranking metrics.

Reads `tasks.contract`, `tasks.ranking` and `tasks.spec`; `tasks.build` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from jaxml.tasks.contract import Batch, Term, require_mask
from jaxml.tasks.ranking import log_odds, roc_auc
from jaxml.tasks.spec import TextClassification


@dataclass(frozen=True)
class TextClassificationTask:
    """Batch: `tokens, positions, segment_ids` int32 [B, T], `label` int32 [B] and `is_valid` bool [B]."""

    spec: TextClassification
    rows_interact: ClassVar[bool] = False

    def loss(self, model, batch: Batch, dropout_keys_B: Key[Array, " B"] | None) -> dict[str, Term]:
        """`loss`: cross entropy in nats, the mean over valid rows weighted by the class weight of their true label."""
        nll_B, _ = self._row_terms(model, batch, dropout_keys_B)
        weights_B = self._weights(batch, nll_B.dtype)
        return {"loss": Term((weights_B * nll_B).sum(), weights_B.sum(), 1.0)}

    def evaluate(self, model, batch: Batch) -> tuple[dict[str, Array], dict[str, Array]]:
        """Sums: `nll` and `weight` (with class weights), `correct`, `num_rows` and `confusion` [true class, predicted
        class] as int32. Rows: `log_probs` [B, C], `label` [B], `is_valid` [B]."""
        nll_B, log_probs_BC = self._row_terms(model, batch, None)
        weights_B = self._weights(batch, nll_B.dtype)
        valid_B = require_mask(batch, "is_valid")
        predicted_B = jnp.argmax(log_probs_BC, axis=-1)
        num_classes = len(self.spec.labels)
        true_BC = jax.nn.one_hot(batch["label"], num_classes, dtype=jnp.int32) * valid_B[:, None]
        guess_BC = jax.nn.one_hot(predicted_B, num_classes, dtype=jnp.int32)
        confusion = jnp.einsum("bt,bp->tp", true_BC, guess_BC)
        sums = {
            "nll": (weights_B * nll_B).sum(),
            "weight": weights_B.sum(),
            "correct": jnp.trace(confusion),
            "num_rows": valid_B.sum(dtype=jnp.int32),
            "confusion": confusion,
        }
        return sums, {"log_probs": log_probs_BC, "label": batch["label"], "is_valid": valid_B}

    def summarize(self, sums: Mapping[str, Any], rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """`eval_loss`, `accuracy`, `num_rows`; with a positive label also `precision`, `recall` and `roc_auc`, the
        exact area under the ROC curve over all rows. What is undefined (no predicted positive, one class only) is left
        out."""
        metrics: dict[str, float] = {"num_rows": int(sums["num_rows"])}
        if float(sums["weight"]) > 0:
            metrics["eval_loss"] = float(sums["nll"]) / float(sums["weight"])
        if metrics["num_rows"]:
            metrics["accuracy"] = int(sums["correct"]) / metrics["num_rows"]
        if not self.spec.positive_label:
            return metrics
        positive = self.spec.labels.index(self.spec.positive_label)
        confusion = np.asarray(sums["confusion"])
        hits, predicted, actual = confusion[positive, positive], confusion[:, positive].sum(), confusion[positive].sum()
        if predicted:
            metrics["precision"] = int(hits) / int(predicted)
        if actual:
            metrics["recall"] = int(hits) / int(actual)
        is_valid = np.asarray(rows["is_valid"], bool)
        is_positive = np.asarray(rows["label"])[is_valid] == positive
        if 0 < is_positive.sum() < is_positive.size:
            metrics["roc_auc"] = roc_auc(log_odds(np.asarray(rows["log_probs"])[is_valid], positive), is_positive)
        return metrics

    def row_losses(self, model, batch: Batch) -> Float[Array, " B"]:
        """Cross entropy of each row (0 for a row of padding)."""
        return self._row_terms(model, batch, None)[0]

    def _row_terms(self, model, batch: Batch, dropout_keys_B: Key[Array, " B"] | None):
        logits_BC, _ = model(batch["tokens"], batch["positions"], batch["segment_ids"], dropout_keys_B)
        log_probs_BC = jax.nn.log_softmax(logits_BC.astype(jnp.promote_types(logits_BC.dtype, jnp.float32)), axis=-1)
        label_B = batch["label"][:, None]
        nll_B = -jnp.take_along_axis(log_probs_BC, label_B, axis=-1, mode="clip")[:, 0]
        return jnp.where(require_mask(batch, "is_valid"), nll_B, 0), log_probs_BC

    def _weights(self, batch: Batch, dtype: jnp.dtype) -> Float[Array, " B"]:
        class_weights_C = jnp.asarray(self.spec.class_weights or (1.0,) * len(self.spec.labels), dtype)
        weights_B = jnp.take(class_weights_C, batch["label"], mode="clip")
        return jnp.where(require_mask(batch, "is_valid"), weights_B, 0)
