"""Attention by blocks of queries, with a backward pass of its own: the XLA form of `models.attention`.

Reads `numerics.precision`; `models.attention` calls it. Dao et al. 2022 (arXiv:2205.14135), section 3.1: the softmax is
computed again in the backward pass from each row's maximum and sum, so no (T, S) array outlives its block; and a block of
queries meets only the keys that it can see. On a CPU this takes half the time of differentiating through a softmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxml.numerics.precision import accumulate_dtype


class Shape(NamedTuple):
    """What is known before tracing. `block`: queries taken at a time."""

    is_causal: bool
    window: int | None
    logit_softcap: float | None
    block: int


class Block(NamedTuple):
    """Queries `first` to `last`, and the keys `begin` to `end` that any of them may see."""

    first: int
    last: int
    begin: int
    end: int


def blocks(num_tokens: int, shape: Shape) -> Iterator[Block]:
    """The blocks of a row, in order.

    >>> [tuple(b) for b in blocks(6, Shape(is_causal=True, window=3, logit_softcap=None, block=4))]
    [(0, 4, 0, 4), (4, 6, 2, 6)]
    """
    reach = num_tokens if shape.window is None else shape.window - 1
    for first in range(0, num_tokens, shape.block):
        last = min(first + shape.block, num_tokens)
        end = last if shape.is_causal else min(num_tokens, last + reach)
        yield Block(first, last, max(0, first - reach), end)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_blocks(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_ids_BT: Int[Array, "B T"],
    shape: Shape,
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H), over the visible keys) v. Scores and sums are in promote_types(dtype, float32)."""
    return _forward(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, shape)[0]


class _Saved(NamedTuple):
    q_BKGTH: Array
    k_BKSH: Array
    v_BKSH: Array
    segment_ids_BT: Array
    out_BKGTH: Array
    peaks: list[Array]  # for each block, the maximum of a query's scores and the sum of their exponentials
    sums: list[Array]


def _forward(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, segment_ids_BT: Array, shape: Shape) -> tuple[Array, _Saved]:
    batch, num_tokens, num_heads, head_width = q_BTNH.shape
    num_kv_heads = k_BTKH.shape[2]
    grouped = (batch, num_tokens, num_kv_heads, num_heads // num_kv_heads, head_width)
    q_BKGTH = (q_BTNH / math.sqrt(head_width)).reshape(grouped).transpose(0, 2, 3, 1, 4)
    k_BKSH, v_BKSH = k_BTKH.transpose(0, 2, 1, 3), v_BTKH.transpose(0, 2, 1, 3)
    outs, peaks, sums = [], [], []
    for block in blocks(num_tokens, shape):
        scores = attention_scores(
            q_BKGTH[:, :, :, block.first : block.last], k_BKSH[:, :, block.begin : block.end], shape
        )
        scores = jnp.where(_mask(segment_ids_BT, block, shape), scores, jnp.finfo(scores.dtype).min)
        peak = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(axis=-1, keepdims=True)
        outs.append(attention_mix(weights, v_BKSH[:, :, block.begin : block.end]) / total)
        peaks.append(peak)
        sums.append(total)
    out_BKGTH = jnp.concatenate(outs, axis=3)
    out_BTNH = out_BKGTH.astype(v_BTKH.dtype).transpose(0, 3, 1, 2, 4).reshape(q_BTNH.shape)
    return out_BTNH, _Saved(q_BKGTH, k_BKSH, v_BKSH, segment_ids_BT, out_BKGTH, peaks, sums)


def _backward(shape: Shape, saved: _Saved, grad_BTNH: Array) -> tuple[Array, Array, Array, None]:
    q_BKGTH, k_BKSH, v_BKSH, segment_ids_BT, out_BKGTH, peaks, sums = saved
    batch, num_kv_heads, groups, num_tokens, head_width = q_BKGTH.shape
    wide = accumulate_dtype(q_BKGTH.dtype)
    grouped = (batch, num_tokens, num_kv_heads, groups, head_width)
    grad_BKGTH = grad_BTNH.reshape(grouped).transpose(0, 2, 3, 1, 4)
    grads_q: list[Array] = []
    parts_k: list[tuple[Block, Array]] = []
    parts_v: list[tuple[Block, Array]] = []
    for block, peak, total in zip(blocks(num_tokens, shape), peaks, sums, strict=True):
        queries = q_BKGTH[:, :, :, block.first : block.last]
        keys, values = k_BKSH[:, :, block.begin : block.end], v_BKSH[:, :, block.begin : block.end]
        scores = attention_scores(queries, keys, shape)
        masked = jnp.where(_mask(segment_ids_BT, block, shape), scores, jnp.finfo(wide).min)
        weights = jnp.exp(masked - peak)  # not divided by their sum: the gradient is, which has H columns and not S
        grad = grad_BKGTH[:, :, :, block.first : block.last].astype(wide) / total
        along = jnp.sum(grad * out_BKGTH[:, :, :, block.first : block.last], axis=-1, keepdims=True)
        grad_scores = weights * (raw_scores(grad, values.astype(wide)) - along)
        if shape.logit_softcap is not None:
            grad_scores = grad_scores * (1.0 - jnp.square(scores / shape.logit_softcap))
        grads_q.append(attention_mix(grad_scores, keys))
        parts_k.append((block, attention_gather(grad_scores, queries)))
        parts_v.append((block, attention_gather(weights, grad)))
    grad_q = jnp.concatenate(grads_q, axis=3) / math.sqrt(head_width)
    q_shape, k_shape = (batch, num_tokens, -1, head_width), (0, 2, 1, 3)
    return (
        grad_q.astype(q_BKGTH.dtype).transpose(0, 3, 1, 2, 4).reshape(q_shape),
        _add(parts_k, num_tokens).astype(k_BKSH.dtype).transpose(k_shape),
        _add(parts_v, num_tokens).astype(v_BKSH.dtype).transpose(k_shape),
        None,
    )


attend_blocks.defvjp(_forward, _backward)


def _mask(segment_ids_BT: Array, block: Block, shape: Shape) -> Bool[Array, "B 1 1 t s"]:
    """Which keys each query of the block sees: of its segment, not later (causal), nearer than the window."""
    queries = segment_ids_BT[:, block.first : block.last, None]
    mask = queries == segment_ids_BT[:, None, block.begin : block.end]
    distance = jnp.arange(block.first, block.last)[:, None] - jnp.arange(block.begin, block.end)[None, :]
    if shape.is_causal:
        mask &= distance >= 0
    if shape.window is not None:
        mask &= jnp.abs(distance) < shape.window
    return mask[:, None, None]


def attention_scores(queries: Array, keys: Array, shape: Shape) -> Array:
    """queries keys^T, soft-capped: [b, K, G, t, s] of [b, K, G, t, H] and [b, K, s, H]."""
    scores = raw_scores(queries, keys)
    if shape.logit_softcap is not None:
        scores = shape.logit_softcap * jnp.tanh(scores / shape.logit_softcap)
    return scores


# Three batched matrix products. The queries of a group of heads are rows of one matrix, so grouped-query attention needs
# no copies of keys and values, and their gradients are summed over the group by the product itself.


def raw_scores(rows_BKGtH: Array, keys_BKsH: Array) -> Array:
    """rows keys^T."""
    product = jnp.einsum("bkqh,bksh->bkqs", _merged(rows_BKGtH), keys_BKsH, preferred_element_type=_wide(keys_BKsH))
    return product.reshape(*rows_BKGtH.shape[:4], -1)


def attention_mix(weights_BKGts: Array, values_BKsH: Array) -> Array:
    """weights values."""
    rows = _merged(weights_BKGts).astype(values_BKsH.dtype)
    product = jnp.einsum("bkqs,bksh->bkqh", rows, values_BKsH, preferred_element_type=_wide(values_BKsH))
    return product.reshape(*weights_BKGts.shape[:4], -1)


def attention_gather(weights_BKGts: Array, rows_BKGtH: Array) -> Array:
    """weights^T rows."""
    left, right = _merged(weights_BKGts).astype(rows_BKGtH.dtype), _merged(rows_BKGtH)
    return jnp.einsum("bkqs,bkqh->bksh", left, right, preferred_element_type=_wide(right))


def _merged(rows_BKGtX: Array) -> Array:
    batch, num_kv_heads, groups, num_rows, width = rows_BKGtX.shape
    return rows_BKGtX.reshape(batch, num_kv_heads, groups * num_rows, width)


def _wide(x: Array) -> jnp.dtype:
    return accumulate_dtype(x.dtype)


def _add(parts: list[tuple[Block, Array]], num_tokens: int) -> Array:
    """The sum of what each block gave to its range of keys."""
    if len(parts) == 1:
        return parts[0][1]
    padded = [jnp.pad(x, ((0, 0), (0, 0), (b.begin, num_tokens - b.end), (0, 0))) for b, x in parts]
    return sum(padded[1:], start=padded[0])
