"""Cross entropy against NumPy with ragged masks, in chunks and at once; evaluation sums; what a mask may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml.errors import DataError
from jaxml.models.spec import ExecutionSpec
from jaxml.tasks.build import build_task
from jaxml.tasks.language import LanguageModelingTask, chunked_row_sums
from jaxml.tasks.spec import LanguageModeling

ROWS, TOKENS, WIDTH, VOCAB = 5, 7, 4, 9


@dataclass
class TableModel:
    """Features are rows of a table, logits a product: a model whose numbers NumPy can redo."""

    params: dict[str, Any]

    def __call__(self, tokens_BT, positions_BT, segment_ids_BT, dropout_keys_B=None):
        return self.params["table"][tokens_BT], {}

    def logits(self, features):
        return features @ self.params["kernel"]


def draw(seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(params, batch): the last row has no counted token, and masked targets are nonsense."""
    rng = np.random.default_rng(seed)
    params = {"table": rng.standard_normal((VOCAB, WIDTH)), "kernel": rng.standard_normal((WIDTH, VOCAB))}
    mask = rng.random((ROWS, TOKENS)) < rng.random((ROWS, 1))
    mask[-1] = False
    targets = np.where(mask, rng.integers(0, VOCAB, (ROWS, TOKENS)), -7).astype(np.int32)
    tokens = rng.integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32)
    zeros = np.zeros_like(tokens)
    return params, {"tokens": tokens, "targets": targets, "positions": zeros, "segment_ids": zeros, "loss_mask": mask}


def reference(params, batch) -> tuple[np.ndarray, np.ndarray]:
    """(nll, logsumexp^2) [B, T], 0 where masked, token by token."""
    nll, square = np.zeros((ROWS, TOKENS)), np.zeros((ROWS, TOKENS))
    for b, t in np.argwhere(batch["loss_mask"]):
        logits = params["table"][batch["tokens"][b, t]] @ params["kernel"]
        partition = math.log(sum(math.exp(logit) for logit in logits))
        nll[b, t], square[b, t] = partition - logits[batch["targets"][b, t]], partition**2
    return nll, square


def task_of(chunk_bytes: int = 2**20, z_loss: float = 0.3) -> LanguageModelingTask:
    task = build_task(LanguageModeling(z_loss), ExecutionSpec(logits_chunk_bytes=chunk_bytes))
    assert isinstance(task, LanguageModelingTask)
    return task


def on_device(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(column) for name, column in batch.items()}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("chunk_bytes", [2**20, 8 * VOCAB * ROWS * 2, 8])
def test_terms_and_evaluation_are_those_of_numpy(chunk_bytes):
    """At once, in chunks of 2 tokens (which does not divide 7) and of 1."""
    params, batch = draw()
    task = task_of(chunk_bytes)
    run = jax.jit(
        lambda params, batch: (
            task.loss(TableModel(params), batch, None),
            task.evaluate(TableModel(params), batch),
            task.row_losses(TableModel(params), batch),
        )
    )
    terms, (sums, rows), row_losses = run(params, on_device(batch))
    nll, square = reference(params, batch)
    num_tokens = batch["loss_mask"].sum()
    assert list(terms) == ["loss", "z_loss"]
    assert terms["loss"].sum == pytest.approx(nll.sum(), rel=1e-12)
    assert terms["z_loss"].sum == pytest.approx(square.sum(), rel=1e-12)
    assert [(float(t.weight), float(t.coefficient)) for t in terms.values()] == [(num_tokens, 1.0), (num_tokens, 0.3)]
    assert rows == {}
    metrics = task.summarize({name: np.asarray(value) for name, value in sums.items()}, {})
    assert metrics["eval_loss"] == pytest.approx(nll.sum() / num_tokens, rel=1e-12)
    assert metrics["perplexity"] == pytest.approx(math.exp(nll.sum() / num_tokens), rel=1e-12)
    assert metrics["num_tokens"] == num_tokens
    counts = np.maximum(batch["loss_mask"].sum(axis=1), 1)
    assert np.allclose(row_losses, nll.sum(axis=1) / counts, rtol=1e-12)
    assert row_losses[-1] == 0


@pytest.mark.usefixtures("float64")
def test_the_gradient_in_chunks_equals_the_gradient_at_once():
    params, batch = draw(1)

    def gradient(chunk_bytes: int) -> dict[str, np.ndarray]:
        def total(params):
            terms = task_of(chunk_bytes).loss(TableModel(params), on_device(batch), None)
            return sum(term.coefficient * term.sum for term in terms.values())

        return jax.jit(jax.grad(total))(params)

    at_once, in_chunks = gradient(2**20), gradient(8 * VOCAB * ROWS * 2)
    for name, leaf in at_once.items():
        assert np.all(np.isfinite(leaf)) and np.any(leaf)
        assert np.max(np.abs(in_chunks[name] - leaf)) <= 1e-12 * np.max(np.abs(leaf))


def test_in_chunks_no_buffer_of_the_full_logits_exists_forward_or_backward():
    rows, tokens, width, vocab = 4, 64, 8, 1024
    full_bytes = rows * tokens * vocab * 4
    shapes = [
        jax.ShapeDtypeStruct((width, vocab), jnp.float32),
        jax.ShapeDtypeStruct((rows, tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((rows, tokens), jnp.int32),
        jax.ShapeDtypeStruct((rows, tokens), jnp.bool_),
    ]

    def temporaries(chunk_bytes: int) -> int:
        def total(kernel, features, targets, mask):
            return chunked_row_sums(lambda x: x @ kernel, features, targets, mask, chunk_bytes)[0].sum()

        compiled = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(full_bytes) >= full_bytes
    assert temporaries(full_bytes // 16) < full_bytes / 3


def test_a_weight_depends_on_the_batch_only():
    """Parameters of NaN leave every weight as it was; that is what lets the step take weights before the forward
    pass."""
    params, batch = draw()
    broken = {name: jnp.full(leaf.shape, jnp.nan, jnp.float32) for name, leaf in params.items()}
    terms = jax.jit(lambda params, batch: task_of().loss(TableModel(params), batch, None))(broken, on_device(batch))
    assert not np.isfinite(terms["loss"].sum)
    assert {float(term.weight) for term in terms.values()} == {float(batch["loss_mask"].sum())}


def test_segment_ids_cannot_act_as_weights():
    """maxtext 092c3e871: a token of segment 3 weighed three times as much."""
    params, batch = draw()
    batch["loss_mask"] = batch["loss_mask"].astype(np.int32) * 3
    with pytest.raises(DataError, match="loss_mask"):
        task_of().loss(TableModel(params), on_device(batch), None)


def test_without_z_loss_there_is_one_term_and_without_tokens_no_average():
    params, batch = draw()
    terms = jax.eval_shape(lambda p, b: task_of(z_loss=0.0).loss(TableModel(p), b, None), params, batch)
    assert list(terms) == ["loss"]
    assert task_of().summarize({"nll": np.float32(0), "num_tokens": np.int32(0)}, {}) == {"num_tokens": 0}
    assert task_of().summarize({"nll": np.float32(1e4), "num_tokens": np.int32(1)}, {})["perplexity"] == math.inf
    assert not task_of().rows_interact
