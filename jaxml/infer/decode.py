"""Prefill, decode step, and the jitted loops over them: the pure functions between a model and its tokens.

Reads `models.build`, `models.cache` and `infer.sampling`; `infer.runner` jits them over pages, `infer.beam` over a
contiguous cache. `model` is the BoundModel of an unrolled decoder (`models.unrolled`), closed over before `jit`;
`params` are its parameters in that layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxml.infer.request import MAX_LOGPROBS
from jaxml.infer.sampling import Leaf, Rows, sample
from jaxml.models.build import BoundModel
from jaxml.models.cache import KeyValueCache, Start, empty_cache

C = TypeVar("C", bound=KeyValueCache)

MAX_STEPS = 64  # of one call of `decode_steps`


class Steps(NamedTuple):
    """What `decode_steps` drew: arrays [R, N] and [R, N, 20]; of row r the first `num_tokens[r]` are tokens, and the last
    of them means nothing where the row is not finite."""

    tokens: Int[Leaf, "R N"]
    logprobs: Float[Leaf, "R N"]
    top_tokens: Int[Leaf, "R N 20"]
    top_logprobs: Float[Leaf, "R N 20"]
    num_tokens: Int[Leaf, " R"]
    is_finite: Bool[Leaf, " R"]


def prefill(
    model: BoundModel, params: Any, tokens_BT: Int[Array, "B T"], start: Start, last_B: Int[Array, " B"], cache: C
) -> tuple[Float[Array, "B V"], C]:
    """(logits of the token at index `last_B` of this piece, cache with the piece), for a piece of each row's prompt.

    `start`: the position of the piece's first token. Rows are padded on the right, with anything; see `Decoder.extend`.
    """
    decoder = model.bind(params)
    features_BTD, cache = decoder.extend(tokens_BT, start, cache)
    last_BD = jnp.take_along_axis(features_BTD, last_B[:, None, None], axis=1, mode="clip")[:, 0]
    return decoder.logits(last_BD), cache


def decode_step(
    model: BoundModel, params: Any, token_R: Int[Array, " R"], position_R: Int[Array, " R"], cache: C
) -> tuple[Float[Array, "R V"], C]:
    """(logits for the token after `token_R`, cache with it), where each row's token is at its own position."""
    decoder = model.bind(params)
    features_R1D, cache = decoder.extend(token_R[:, None], position_R, cache)
    return decoder.logits(features_R1D[:, 0]), cache


def decode_steps(
    model: BoundModel, params: Any, cache: C, rows: Rows, num_steps: Int[Array, ""]
) -> tuple[Steps, C, Rows]:
    """Up to `num_steps` (at most MAX_STEPS) tokens for every row that is not done; ends early when all are.

    A row that is done computes on, and neither its history nor a visible slot of its cache changes.
    """
    num_rows = rows.token.shape[0]
    before = rows.num_generated

    def is_more(carry: Any) -> Bool[Array, ""]:
        step, *_, rows = carry
        return (step < num_steps) & ~rows.is_done.all()

    def one(carry: Any) -> Any:
        step, out, is_finite, cache, rows = carry
        logits_RV, cache = decode_step(model, params, rows.token, rows.position, cache)
        is_done = rows.is_done
        rows, drawn = sample(logits_RV, rows)
        out = jax.tree.map(lambda into, new: into.at[:, step].set(new), out, tuple(drawn[:4]))
        return step + 1, out, is_finite & (is_done | drawn.is_finite), cache, rows

    def room(*shape: int, dtype: Any) -> Array:
        return jnp.zeros((num_rows, MAX_STEPS, *shape), dtype)

    out = (
        room(dtype=jnp.int32),
        room(dtype=jnp.float32),
        room(MAX_LOGPROBS, dtype=jnp.int32),
        room(MAX_LOGPROBS, dtype=jnp.float32),
    )
    begin = (jnp.int32(0), out, jnp.ones(num_rows, bool), cache, rows)
    _, out, is_finite, cache, rows = jax.lax.while_loop(is_more, one, begin)
    return Steps(*out, jnp.asarray(rows.num_generated - before), is_finite), cache, rows


def generate(
    model: BoundModel,
    params: Any,
    prompts_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
    rows: Rows,
    *,
    max_tokens: int,
) -> tuple[Int[Array, "B N"], Int[Array, " B"]]:
    """(tokens, how many of them each row has) for a batch of ragged prompts, in one traceable function.

    Prompts are padded on the right, with anything; `rows` come from `sampling.make_row` (row b with the prompt
    `prompts_BT[b, :lengths_B[b]]` and at most N = `max_tokens`). Not for text: stop strings need `LanguageModel.generate`.
    """
    num_rows, num_tokens = prompts_BT.shape
    cache = empty_cache(model.spec, num_rows, num_tokens + max_tokens, model.policy.compute)  # type: ignore[arg-type]
    logits_BV, cache = prefill(model, params, prompts_BT, jnp.int32(0), lengths_B - 1, cache)
    rows, first = sample(logits_BV, rows)
    out_BN = jnp.zeros((num_rows, max_tokens), jnp.int32).at[:, 0].set(first.token)

    def one(step: Array, carry: Any) -> Any:
        out_BN, cache, rows = carry
        logits_BV, cache = decode_step(model, params, rows.token, rows.position, cache)
        rows, drawn = sample(logits_BV, rows)
        return out_BN.at[:, step].set(drawn.token), cache, rows

    out_BN, _, rows = jax.lax.fori_loop(1, max_tokens, one, (out_BN, cache, rows))
    is_token = jnp.arange(max_tokens) < rows.num_generated[:, None]
    return jnp.where(is_token, out_BN, 0), rows.num_generated
