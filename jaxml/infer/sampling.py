"""From logits to the next token of each row: penalties, filters, draw, and when a row ends. Pure and jitted.

Reads `infer.request`; `infer.decode` samples with it. Every array has one entry a row and no operation mixes rows, so a
row's tokens depend on its own logits, settings and history alone. Work that no row asks for is skipped (`lax.cond`); where
another row asks for it, it leaves a row that does not exactly as it was.

Order: penalties, logit_bias, tokens forbidden until min_tokens or by a constraint, temperature, then the filters top_k,
top_p (of what top_k left) and min_p, then the draw by the Gumbel-max trick (Gumbel 1954) with the key
fold_in(key(seed), position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxml.infer.request import MAX_BIASED_TOKENS, MAX_LOGPROBS, MAX_STOP_TOKENS, Sampling
from jaxml.numerics.precision import accumulate_dtype

Leaf = Array | np.ndarray

NO_TOKEN = -1
STOP_SLOTS = MAX_STOP_TOKENS + 1  # the tokenizer's own end of text is one more


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The sampling settings and the history of each row (R rows), as a pytree. A row that is not in use is done."""

    temperature: Float[Leaf, " R"]
    top_k: Int[Leaf, " R"]
    top_p: Float[Leaf, " R"]
    min_p: Float[Leaf, " R"]
    repetition: Float[Leaf, " R"]
    presence: Float[Leaf, " R"]
    frequency: Float[Leaf, " R"]
    seed: UInt[Leaf, " R"]
    min_tokens: Int[Leaf, " R"]
    max_tokens: Int[Leaf, " R"]
    stop_tokens: Int[Leaf, "R 17"]  # NO_TOKEN fills
    biased_tokens: Int[Leaf, "R 300"]  # NO_TOKEN fills
    biases: Float[Leaf, "R 300"]
    is_constrained: Bool[Leaf, " R"]
    allowed: UInt[Leaf, "R W"]  # bit t % 32 of word t // 32 is set: token t may come next; read where is_constrained
    wants_logprobs: Bool[Leaf, " R"]
    in_prompt: Bool[Leaf, "R V"]
    counts: Int[Leaf, "R V"]  # of generated tokens
    token: Int[Leaf, " R"]  # the last one, not yet in the cache
    position: Int[Leaf, " R"]  # of that token
    num_generated: Int[Leaf, " R"]
    is_done: Bool[Leaf, " R"]


class Drawn(NamedTuple):
    """The tokens of one step; log-probabilities are of the model's own distribution, and zero where none were wanted.

    is_finite: no logit of the row was infinite or not a number. Where one was, the token means nothing.
    """

    token: Int[Array, " R"]
    logprob: Float[Array, " R"]
    top_tokens: Int[Array, "R 20"]
    top_logprobs: Float[Array, "R 20"]
    is_finite: Bool[Array, " R"]


def num_words(vocab_size: int) -> int:
    """Words of a row of `Rows.allowed`."""
    return -(-vocab_size // 32)


def make_row(
    sampling: Sampling, prompt: Sequence[int], *, vocab_size: int, max_tokens: int, seed: int, eos: Sequence[int]
) -> Rows:
    """One row (R = 1, NumPy arrays) that is about to draw its first token, after `prompt`.

    max_tokens: the ceiling that holds here. seed: from 0 to 2^32 - 1. eos: tokens that end an answer unless ignore_eos.
    """
    stop = [*(() if sampling.ignore_eos else eos), *sampling.stop_token_ids]
    biased = [NO_TOKEN] * MAX_BIASED_TOKENS
    biases = [0.0] * MAX_BIASED_TOKENS
    for place, (token, bias) in enumerate(sampling.logit_bias):
        biased[place], biases[place] = token, bias
    in_prompt = np.zeros((1, vocab_size), np.bool_)
    in_prompt[0, list(prompt)] = True

    def number(value: float, dtype: type = np.float32) -> np.ndarray:
        return np.array([value], dtype)

    return Rows(
        temperature=number(sampling.temperature),
        top_k=number(min(sampling.top_k, vocab_size), np.int32),
        top_p=number(sampling.top_p),
        min_p=number(sampling.min_p),
        repetition=number(sampling.repetition_penalty),
        presence=number(sampling.presence_penalty),
        frequency=number(sampling.frequency_penalty),
        seed=number(seed, np.uint32),
        min_tokens=number(min(sampling.min_tokens, max_tokens), np.int32),
        max_tokens=number(max_tokens, np.int32),
        stop_tokens=np.array([stop + [NO_TOKEN] * (STOP_SLOTS - len(stop))], np.int32),
        biased_tokens=np.array([biased], np.int32),
        biases=np.array([biases], np.float32),
        is_constrained=number(sampling.constraint is not None, np.bool_),
        allowed=np.zeros((1, num_words(vocab_size)), np.uint32),
        wants_logprobs=number(sampling.num_logprobs is not None, np.bool_),
        in_prompt=in_prompt,
        counts=np.zeros((1, vocab_size), np.int32),
        token=number(prompt[-1], np.int32),
        position=number(len(prompt) - 1, np.int32),
        num_generated=number(0, np.int32),
        is_done=number(False, np.bool_),
    )  # type: ignore[arg-type]


def empty_rows(num_rows: int, vocab_size: int) -> Rows:
    """Rows that are not in use (NumPy arrays)."""
    one = make_row(Sampling(), [0], vocab_size=vocab_size, max_tokens=1, seed=0, eos=[])
    rows = jax.tree.map(lambda leaf: np.repeat(leaf, num_rows, axis=0), one)
    rows.is_done[:] = True
    return rows


def sample(logits_RV: Float[Array, "R V"], rows: Rows) -> tuple[Rows, Drawn]:
    """Draw the next token of every row that is not done, and note it; a row that is done stays as it is."""
    wide_RV = logits_RV.astype(accumulate_dtype(logits_RV.dtype))
    drawn = _drawn(wide_RV, _choose(_adjusted(wide_RV, rows), rows), rows)
    is_live = ~rows.is_done
    is_lost = is_live & ~drawn.is_finite
    num_generated = rows.num_generated + is_live
    index = jnp.arange(drawn.token.shape[0])
    is_stop = (drawn.token[:, None] == rows.stop_tokens).any(-1)
    noted = replace(
        rows,
        counts=jnp.asarray(rows.counts).at[index, drawn.token].add(is_live.astype(rows.counts.dtype)),
        token=jnp.where(is_live, drawn.token, rows.token),
        position=rows.position + is_live,
        num_generated=num_generated,
        is_done=rows.is_done | is_lost | (is_live & (is_stop | (num_generated >= rows.max_tokens))),
    )
    return noted, drawn


def _adjusted(logits_RV: Array, rows: Rows) -> Array:
    """Logits after penalties and biases, with the tokens at -inf that would end a row too early or break its constraint."""

    def penalised() -> Array:
        is_generated = rows.counts > 0
        scale = jnp.where(logits_RV > 0, 1 / rows.repetition[:, None], rows.repetition[:, None])
        scaled = logits_RV * jnp.where(is_generated | rows.in_prompt, scale, 1)
        return scaled - rows.presence[:, None] * is_generated - rows.frequency[:, None] * rows.counts

    has_penalty = (rows.repetition != 1) | (rows.presence != 0) | (rows.frequency != 0)
    # A penalty that is off must not touch a bit: other rows decide whether this branch runs.
    adjusted = jax.lax.cond(
        has_penalty.any(), lambda: jnp.where(has_penalty[:, None], penalised(), logits_RV), lambda: logits_RV
    )
    vocab_size = logits_RV.shape[1]
    index = jnp.arange(logits_RV.shape[0])[:, None]
    is_biased = rows.biased_tokens != NO_TOKEN

    def with_biases() -> Array:
        slots = jnp.where(is_biased, rows.biased_tokens, vocab_size)
        return adjusted.at[index, slots].add(rows.biases.astype(adjusted.dtype), mode="drop")

    biased = jax.lax.cond(is_biased.any(), with_biases, lambda: adjusted)
    is_early = rows.num_generated < rows.min_tokens

    def without_stops() -> Array:
        slots = jnp.where(is_early[:, None] & (rows.stop_tokens != NO_TOKEN), rows.stop_tokens, vocab_size)
        return biased.at[index, slots].set(-jnp.inf, mode="drop")

    unstopped = jax.lax.cond(is_early.any(), without_stops, lambda: biased)

    def only_allowed() -> Array:
        tokens = jnp.arange(vocab_size)
        is_allowed = (rows.allowed[:, tokens // 32] >> (tokens % 32).astype(jnp.uint32)) & 1
        return jnp.where((is_allowed == 1) | ~rows.is_constrained[:, None], unstopped, -jnp.inf)

    return jax.lax.cond(jnp.asarray(rows.is_constrained).any(), only_allowed, lambda: unstopped)


def _choose(logits_RV: Array, rows: Rows) -> Int[Array, " R"]:
    greedy_R = jnp.argmax(logits_RV, axis=-1).astype(jnp.int32)
    is_random = rows.temperature > 0

    def draw() -> Array:
        scaled_RV = logits_RV / jnp.where(is_random, rows.temperature, 1)[:, None]
        has_filter = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
        kept_RV = jax.lax.cond((has_filter & is_random).any(), lambda: _filtered(scaled_RV, rows), lambda: scaled_RV)
        keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(
            rows.seed, rows.position + 1
        )
        noise_RV = jax.vmap(lambda key: jax.random.gumbel(key, (logits_RV.shape[1],), jnp.float32))(keys)
        return jnp.where(is_random, jnp.argmax(kept_RV + noise_RV, axis=-1).astype(jnp.int32), greedy_R)

    return jax.lax.cond((is_random & ~rows.is_done).any(), draw, lambda: greedy_R)


def _filtered(logits_RV: Array, rows: Rows) -> Array:
    """Logits outside top_k, top_p or min_p at -inf. Ties with the last token that is kept are kept.

    top_p (nucleus): Holtzman et al. 2020 (arXiv:1904.09751). min_p: Nguyen et al. 2024 (arXiv:2407.01082).
    """
    vocab_size = logits_RV.shape[1]
    sorted_RV = -jnp.sort(-logits_RV, axis=-1)
    last_k = jnp.where(rows.top_k > 0, rows.top_k, vocab_size) - 1
    floor_k = jnp.take_along_axis(sorted_RV, last_k[:, None], axis=-1)
    top_RV = jnp.where(sorted_RV >= floor_k, sorted_RV, -jnp.inf)
    probs_RV = jax.nn.softmax(top_RV, axis=-1)
    before_RV = jnp.cumsum(probs_RV, axis=-1) - probs_RV
    num_kept = jnp.maximum((before_RV < rows.top_p[:, None]).sum(-1), 1)
    floor_p = jnp.take_along_axis(sorted_RV, num_kept[:, None] - 1, axis=-1)
    floor_p = jnp.where(rows.top_p[:, None] < 1, floor_p, -jnp.inf)
    floor_min = jnp.where(rows.min_p > 0, sorted_RV[:, 0] + jnp.log(jnp.maximum(rows.min_p, 1e-38)), -jnp.inf)[:, None]
    floor = jnp.maximum(jnp.maximum(floor_k, floor_p), floor_min)
    return jnp.where(logits_RV >= floor, logits_RV, -jnp.inf)


def _drawn(logits_RV: Array, token_R: Array, rows: Rows) -> Drawn:
    num_top = min(MAX_LOGPROBS, logits_RV.shape[1])
    wanted = rows.wants_logprobs & ~rows.is_done

    def measured() -> tuple[Array, Array, Array]:
        log_probs_RV = jax.nn.log_softmax(logits_RV, axis=-1)
        top_logprobs, top_tokens = jax.lax.top_k(log_probs_RV, num_top)
        chosen = jnp.take_along_axis(log_probs_RV, token_R[:, None], axis=-1)[:, 0]
        return chosen.astype(jnp.float32), top_tokens, top_logprobs.astype(jnp.float32)

    def nothing() -> tuple[Array, Array, Array]:
        shape = (token_R.shape[0], num_top)
        return jnp.zeros(shape[:1], jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    logprob, top_tokens, top_logprobs = jax.lax.cond(wanted.any(), measured, nothing)
    fill = ((0, 0), (0, MAX_LOGPROBS - num_top))
    is_finite = jnp.isfinite(logits_RV).all(-1)
    top_logprobs = jnp.pad(top_logprobs, fill, constant_values=-jnp.inf)
    return Drawn(token_R, logprob, jnp.pad(top_tokens, fill), top_logprobs, is_finite)
