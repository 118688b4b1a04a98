"""Beam search: the most likely answers as wholes, as far as a beam of partial ones finds them.

Reads `infer.decode`, `infer.decoding_model` and `infer.request`; `LanguageModel.beam_search` turns the result into text.

An answer's score is the sum of its tokens' log-probabilities divided by (their number) ** length_penalty (Wu et al. 2016,
arXiv:1609.08144, section 7, without its constant 5), the token that ends it counted. Each step takes the 2 R best
continuations of R beams, so that R live ones are left even when half of them end; the search is over when no live beam can
still beat the R best answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxml.errors import RequestError
from jaxml.infer.decode import decode_step
from jaxml.infer.decoding_model import DecodingModel
from jaxml.infer.request import FinishReason, Request
from jaxml.models.build import BoundModel
from jaxml.models.cache import Cache

MAX_BEAMS = 64


@dataclass(frozen=True)
class Hypothesis:
    """One answer: its tokens without the one that ended it, the sum of log-probabilities (nats, with it), the score."""

    tokens: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: FinishReason


def beam_search(
    model: DecodingModel, prompt: Sequence[int], *, num_beams: int, max_tokens: int | None, length_penalty: float
) -> list[Hypothesis]:
    """The `num_beams` best answers found, best first; at least one.

    max_tokens: None is what fits into the context. Raises RequestError: num_beams out of range, a penalty that is not
    finite, a prompt that does not fit.
    """
    if not 1 <= num_beams <= MAX_BEAMS or not math.isfinite(length_penalty):
        raise RequestError(
            "num_beams and length_penalty",
            expected=f"beams from 1 to {MAX_BEAMS}, and a finite penalty",
            got=f"{num_beams}, {length_penalty}",
            todo="correct them",
        )
    limit = model.limit(Request("beam", tuple(prompt)))
    limit = limit if max_tokens is None else min(limit, max_tokens)
    logits, cache = _prefill(model, prompt)
    parents = np.zeros(num_beams, np.int32)
    scores = np.full(num_beams, -np.inf, np.float32)
    scores[0] = 0.0
    sequences: list[tuple[int, ...]] = [()] * num_beams
    finished: list[Hypothesis] = []
    best = _best(jnp.asarray(scores), jnp.broadcast_to(logits, (num_beams, logits.shape[1])))
    for length in range(1, limit + 1):
        totals, beams, tokens = (np.asarray(part) for part in best)
        live: list[tuple[float, int, int]] = []
        for rank, (total, beam, token) in enumerate(zip(totals.tolist(), beams.tolist(), tokens.tolist(), strict=True)):
            if total == -math.inf or len(live) == num_beams:
                break
            if token not in model.eos:
                live.append((total, beam, token))
            elif rank < num_beams:
                finished.append(Hypothesis(sequences[beam], total, total / length**length_penalty, "stop"))
        finished = sorted(finished, key=lambda found: -found.score)[:num_beams]
        sequences = [(*sequences[beam], token) for _, beam, token in live]
        if length == limit or not live or _is_over(finished, live[0][0], length, limit, length_penalty, num_beams):
            break
        fill = num_beams - len(live)
        scores = np.array([total for total, _, _ in live] + [-np.inf] * fill, np.float32)
        parents = np.array([beam for _, beam, _ in live] + [0] * fill, np.int32)
        token = np.array([token for _, _, token in live] + [0] * fill, np.int32)
        step = _step_of(model)
        best, cache = step(model.params, cache, parents, token, np.int32(len(prompt) + length - 1), scores)
    else:
        live = []
    finished += [
        Hypothesis(sequence, total, total / len(sequence) ** length_penalty, "length")
        for sequence, (total, _, _) in zip(sequences, live, strict=True)
        if len(sequence) == limit
    ]
    return sorted(finished, key=lambda found: -found.score)[:num_beams]


def _prefill(model: DecodingModel, prompt: Sequence[int]) -> tuple[Array, Cache]:
    cache, start = model.empty_cache(1, model.capacity), 0
    logits = None
    while start < len(prompt):
        logits, cache, start = model.prefill(prompt, start, cache)
    assert logits is not None
    return logits, cache


def _is_over(
    finished: list[Hypothesis], best_live: float, length: int, limit: int, length_penalty: float, num_beams: int
) -> bool:
    """Whether no live beam can beat the worst of `num_beams` answers: its sum can only fall, so its score is bounded by
    that sum at the length which flatters it most."""
    if len(finished) < num_beams:
        return False
    flattering = limit if length_penalty > 0 else length + 1
    return best_live / flattering**length_penalty <= finished[-1].score


@jax.jit
def _best(scores_R: Float[Array, " R"], logits_RV: Float[Array, "R V"]) -> tuple[Array, Array, Array]:
    """(sum, beam, token) of the 2 R best continuations, best first."""
    num_beams, vocab_size = logits_RV.shape
    totals_RV = scores_R[:, None] + jax.nn.log_softmax(logits_RV.astype(jnp.float32), axis=-1)
    totals, index = jax.lax.top_k(totals_RV.reshape(-1), 2 * num_beams)
    return totals, index // vocab_size, index % vocab_size


def _step(
    model: BoundModel,
    params: Any,
    cache: Cache,
    parents_R: Int[Array, " R"],
    token_R: Int[Array, " R"],
    position: Int[Array, ""],
    scores_R: Float[Array, " R"],
) -> tuple[Any, Cache]:
    """Take the rows of the parents, add a token to each, and rank what may follow. The first call has a cache of one row."""
    cache = jax.tree.map(lambda leaf: leaf[parents_R], cache)
    logits_RV, cache = decode_step(model, params, token_R, jnp.broadcast_to(position, token_R.shape), cache)
    return _best(scores_R, logits_RV), cache


def _step_of(model: DecodingModel) -> Any:
    """`_step` for a model, jitted once."""
    if model.beam_step is None:
        model.beam_step = jax.jit(partial(_step, model.bound))
    return model.beam_step
