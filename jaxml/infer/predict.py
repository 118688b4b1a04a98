"""Labels for texts: a classifier from a checkpoint, with the preprocessing that its training had.

Reads `infer.opening`, `inputs.tokenizers` and `tasks.spec`; `serve.classify` and `cli.predict` read it.

Products of different row counts differ in their last bits, so every batch here has the same number of rows and the row
length of training, filled up with rows of padding: a text gets the same bits alone and among others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from jaxml.errors import CheckpointError, DataError, RequestError
from jaxml.infer.opening import Opened, open_checkpoint
from jaxml.inputs.tokenizers import Tokenizer, encode_document
from jaxml.models.check import decoder_of
from jaxml.tasks.spec import TextClassification

NUM_ROWS = 8


@dataclass(frozen=True)
class Prediction:
    """The most likely label of a text, and the probability of each label."""

    label: str
    probabilities: dict[str, float]


class TextClassifier:
    """`predict` of a classifier's checkpoint; `labels` are its class names in order.

    num_rows: texts that are computed together; part of what decides the last bits, like the device.
    """

    def __init__(self, opened: Opened, num_rows: int = NUM_ROWS):
        if not isinstance(opened.task, TextClassification):
            raise CheckpointError(
                f"checkpoint {opened.described.directory}, step {opened.described.step}",
                expected="a text classifier",
                got=f"a model for {type(opened.task).__name__}",
                todo="use `jaxml generate`, or take a classifier's checkpoint",
            )
        self.name = opened.described.name
        self.labels = opened.labels
        self.num_rows = num_rows
        self.row_length = _row_length(opened)
        self.truncates = opened.described.data.get("too_long") == "truncate"
        self._tokenizer: Tokenizer = opened.require_tokenizer()
        self._opened = opened
        self._compiled = jax.jit(self._log_probs)

    @classmethod
    def open(cls, path: str | os.PathLike[str], num_rows: int = NUM_ROWS) -> TextClassifier:
        """The classifier at a run, checkpoints or step directory, after it has reproduced its probe.

        Raises CheckpointError: nothing usable there, not a classifier, no tokenizer.
        """
        return cls(open_checkpoint(path), num_rows)

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """One prediction a text, in their order. Raises RequestError as `encode` does, naming the text by its number."""
        return self.predict_encoded([self.encode(text, f"text {number}") for number, text in enumerate(texts)])

    def encode(self, text: str, name: str = "the text") -> UInt32[np.ndarray, " S"]:
        """The ids of a text as a row of training had them.

        Raises RequestError: no token, a character that the vocabulary does not have, or more tokens than a row where
        the training data refused such texts (`too_long`).
        """
        try:
            ids = encode_document(self._tokenizer, self._tokenizer.encode_array(text))
        except DataError as error:
            first = error.faults[0]
            raise RequestError(
                f"{name}: {first.failed}", expected=first.expected, got=first.got, todo="change it"
            ) from error
        if len(ids) == 0:
            raise RequestError(name, expected="at least one token", got="an empty text", todo="leave it out")
        if len(ids) > self.row_length and not self.truncates:
            raise RequestError(
                name,
                expected=f"at most {self.row_length} tokens, as in training (too_long is 'refuse')",
                got=f"{len(ids)} tokens",
                todo="shorten it, or train with --data.too-long truncate",
            )
        return ids[: self.row_length]

    def predict_encoded(self, rows: Sequence[np.ndarray]) -> list[Prediction]:
        """One prediction for each row of ids that `encode` gave (their lengths differ)."""
        predictions = []
        for start in range(0, len(rows), self.num_rows):
            chosen = rows[start : start + self.num_rows]
            with jax.set_mesh(self._opened.mesh):
                log_probs = np.asarray(self._compiled(self._opened.params, self._batch(chosen)))
            # In float64: a softmax in float32 need not sum to 1 in more than six digits.
            probabilities = np.exp(log_probs[: len(chosen)].astype(np.float64))
            probabilities /= probabilities.sum(axis=1, keepdims=True)
            predictions += [
                Prediction(self.labels[int(row.argmax())], dict(zip(self.labels, row.tolist(), strict=True)))
                for row in probabilities
            ]
        return predictions

    def warm_up(self) -> None:
        """Compile the one program that `predict` needs."""
        self.predict_encoded([np.zeros(1, np.uint32)])

    def _log_probs(self, params: dict[str, Any], batch: dict[str, Array]) -> Float[Array, "B C"]:
        module = self._opened.bound.bind(params)
        logits_BC, _ = module(batch["tokens"], batch["positions"], batch["segment_ids"])
        return jax.nn.log_softmax(logits_BC.astype(jnp.promote_types(logits_BC.dtype, jnp.float32)), axis=-1)

    def _batch(self, rows: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """`tokens`, `positions`, `segment_ids` int32 [num_rows, row_length], as `data.batches` fills them."""
        shape = (self.num_rows, self.row_length)
        batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segment_ids")}
        for index, ids in enumerate(rows):
            here = slice(0, len(ids))
            batch["tokens"][index, here] = ids
            batch["positions"][index, here] = np.arange(len(ids))
            batch["segment_ids"][index, here] = 1
        return batch


def _row_length(opened: Opened) -> int:
    """Tokens of a training row; the model's context where the checkpoint does not say (an imported model)."""
    context_length = decoder_of(opened.described.model).context_length
    return min(int(opened.described.data.get("sequence_length", context_length)), context_length)
