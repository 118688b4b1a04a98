"""How likely a model finds given tokens: the full forward pass on the canonical parameters, in few compiled shapes.

Reads `infer.opening` and `models`; `infer.evaluation`, `infer.eval_sets` and `cli.score` read it.

Rows are padded to a power of two of tokens (at most the context) and batches to a power of two of rows, so that a set of
any size compiles a handful of programs. Padding is of segment 0, which no row sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxml.errors import CheckpointError, Fault, RequestError
from jaxml.infer.opening import Opened
from jaxml.infer.text import encode_prompt, token_text
from jaxml.models.build import BoundModel
from jaxml.models.spec import DecoderSpec

TOKENS_PER_CALL = 4096  # rows times tokens of one call, at most (one row of any length is always taken)
SHORTEST_ROW = 16

Ids = Sequence[int] | np.ndarray


def score(opened: Opened, sequences: Sequence[Ids]) -> list[Float[np.ndarray, " _"]]:
    """For each sequence of n token ids, the n - 1 log-probabilities (nats) of every token after the first given those
    before it, in promote_types(compute, float32).

    A sequence may have one token more than the context, because the last one is only predicted. Raises RequestError with
    every fault: no tokens, ids outside the vocabulary, a sequence that is too long; CheckpointError for a model that does
    not predict tokens.
    """
    spec = language_model_spec(opened)
    rows = [np.asarray(ids, np.int64).reshape(-1) for ids in sequences]
    faults = [fault for number, row in enumerate(rows) for fault in _faults(row, spec, f"sequence {number}")]
    if faults:
        raise RequestError.from_faults(faults)
    by_length: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        by_length.setdefault(padded_length(len(row) - 1, spec.context_length), []).append(number)
    scored: dict[int, np.ndarray] = {}
    for length, numbers in sorted(by_length.items()):
        most = max(1, TOKENS_PER_CALL // length)
        for start in range(0, len(numbers), most):
            batch = numbers[start : start + most]
            logprobs = _score_batch(opened, [rows[number] for number in batch], length)
            for number, row_logprobs in zip(batch, logprobs, strict=True):
                scored[number] = row_logprobs[: len(rows[number]) - 1]
    return [scored[number] for number in range(len(rows))]


@dataclass(frozen=True)
class ScoredText:
    """The tokens of a text, what each writes by itself, and their log-probabilities (None for a first token that has no
    other one before it); `sum` and `mean` (NaN for none) are over those that have one, in nats."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    logprobs: tuple[float | None, ...]

    @property
    def sum(self) -> float:
        return math.fsum(value for value in self.logprobs if value is not None)

    @property
    def mean(self) -> float:
        num_scored = sum(value is not None for value in self.logprobs)
        return self.sum / num_scored if num_scored else math.nan


def score_text(opened: Opened, text: str) -> ScoredText:
    """`score` of one text, after the token that begins one, if the tokenizer has it. Raises RequestError as `score` does."""
    tokenizer = opened.require_tokenizer()
    ids = encode_prompt(tokenizer, text)
    found: list[float | None] = [None, *score(opened, [ids])[0].tolist()]
    if tokenizer.bos_id is not None:
        ids, found = ids[1:], found[1:]
    pieces = (token_text(tokenizer, token).decode("utf-8", errors="replace") for token in ids)
    return ScoredText(tuple(ids), tuple(pieces), tuple(found))


def language_model_spec(opened: Opened) -> DecoderSpec:
    """The decoder of a causal language model. Raises CheckpointError for any other model."""
    spec = opened.model
    if isinstance(spec, DecoderSpec) and spec.is_causal:
        return spec
    raise CheckpointError(
        f"the model of {opened.described.directory}",
        expected="a causal language model",
        got=type(spec).__name__ if not isinstance(spec, DecoderSpec) else "a bidirectional decoder",
        todo="use `jaxml predict` or `jaxml eval` without a text for a classifier",
    )


def padded_length(num_tokens: int, context_length: int) -> int:
    """The next power of two, from `SHORTEST_ROW` to the context.

    >>> [padded_length(n, 100) for n in (0, 16, 17, 65)]
    [16, 16, 32, 100]
    """
    power = 1 << max(num_tokens - 1, 0).bit_length()
    return min(max(power, SHORTEST_ROW), context_length)


def _faults(row: np.ndarray, spec: DecoderSpec, name: str) -> list[Fault]:
    if len(row) == 0:
        return [Fault(name, "at least one token", "none", "give a text, or leave the sequence out")]
    faults = []
    outside = row[(row < 0) | (row >= spec.vocab_size)]
    if len(outside):
        expected = f"token ids from 0 to {spec.vocab_size - 1}"
        todo = "encode the text with the model's own tokenizer"
        faults.append(Fault(name, expected, ", ".join(map(str, outside[:5])), todo))
    if len(row) > spec.context_length + 1:
        expected = f"at most {spec.context_length + 1} tokens: a context of {spec.context_length} and one that follows"
        todo = (
            f"shorten it by {len(row) - spec.context_length - 1}, or evaluate the text in windows (`jaxml eval --text`)"
        )
        faults.append(Fault(name, expected, f"{len(row)} tokens", todo))
    return faults


def _score_batch(opened: Opened, rows: list[np.ndarray], length: int) -> np.ndarray:
    num_rows = 1 << (len(rows) - 1).bit_length()
    inputs, targets, segments = (np.zeros((num_rows, length), np.int32) for _ in range(3))
    for index, row in enumerate(rows):
        inputs[index, : len(row) - 1], targets[index, : len(row) - 1] = row[:-1], row[1:]
        segments[index, : len(row) - 1] = 1
    with jax.set_mesh(opened.mesh):
        return np.asarray(_logprobs(opened.bound, opened.params, inputs, targets, segments))[: len(rows)]


@partial(jax.jit, static_argnums=0)
def _logprobs(
    bound: BoundModel,
    params: Any,
    inputs_BT: Int[Array, "B T"],
    targets_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
) -> Float[Array, "B T"]:
    model = bound.bind(params)
    positions_BT = jnp.broadcast_to(jnp.arange(inputs_BT.shape[1], dtype=jnp.int32), inputs_BT.shape)
    features_BTD, _ = model(inputs_BT, positions_BT, segment_ids_BT)
    return target_logprobs(model.logits, features_BTD, targets_BT, bound.execution.logits_chunk_bytes)


def target_logprobs(
    head: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]],
    features_BTD: Float[Array, "B T D"],
    targets_BT: Int[Array, "B T"],
    chunk_bytes: int,
) -> Float[Array, "B T"]:
    """logits[target] - logsumexp(logits) at every position.

    Once the logits would exceed `chunk_bytes`, `head` sees a run of tokens of every row at a time, so that no more than
    one chunk of logits (and at least one token of each row) is held.
    """
    logits = jax.eval_shape(head, features_BTD)
    num_tokens = targets_BT.shape[1]
    num_chunks = min(num_tokens, math.ceil(logits.size * logits.dtype.itemsize / chunk_bytes))
    if num_chunks <= 1:
        return _pick(head(features_BTD), targets_BT)
    size = math.ceil(num_tokens / num_chunks)
    num_chunks = math.ceil(num_tokens / size)

    def split(array: Array) -> Array:
        padding = [(0, 0), (0, num_chunks * size - num_tokens)] + [(0, 0)] * (array.ndim - 2)
        padded = jnp.pad(array, padding)
        return jnp.moveaxis(padded.reshape(array.shape[0], num_chunks, size, *array.shape[2:]), 1, 0)

    chunks_NBC = jax.lax.map(lambda chunk: _pick(head(chunk[0]), chunk[1]), (split(features_BTD), split(targets_BT)))
    return jnp.moveaxis(chunks_NBC, 0, 1).reshape(targets_BT.shape[0], -1)[:, :num_tokens]


def _pick(logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"]) -> Float[Array, "B T"]:
    picked_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return picked_BT - jax.nn.logsumexp(logits_BTV, axis=-1)
