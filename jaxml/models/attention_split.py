"""Attention over tokens that the mesh splits: each device has a stretch of every row, and keys come from the others.

Reads `models.attention_blocks` for the products and `devices.sharding` for the axes; `models.attention` calls it where the
mesh in force has a token axis. Two forms of one sum. The ring (Liu et al. 2023, arXiv:2310.01889): keys and values go
round, and each device adds what it sees to a softmax that is kept open, as in Milakov & Gimelshein 2018
(arXiv:1805.02867). Gathered: every device takes all keys at once, which on few devices is one collective instead of many.
Masks compare positions within the whole row, so causal, windowed and packed rows are exact wherever they are cut.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxml.devices.sharding import BATCH_AXES, TOKEN_AXIS, axis_size, split_heads
from jaxml.models.attention_blocks import Shape, attention_gather, attention_mix, attention_scores, raw_scores
from jaxml.numerics.precision import accumulate_dtype

Form = Literal["ring", "gather"]


def choose_form(choice: Literal["auto", "ring", "gather"], num_devices: int) -> Form:
    """`auto`: gathered on two devices, where a ring would send as much in as many pieces; else round the ring.

    >>> choose_form("auto", 2), choose_form("auto", 4), choose_form("gather", 4)
    ('gather', 'ring', 'gather')
    """
    if choice == "auto":
        return "gather" if num_devices <= 2 else "ring"
    return choice


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend_split(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_ids_BT: Int[Array, "B T"],
    shape: Shape,
    form: Form,
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H), over the visible keys) v, as `attend_blocks` defines it, with T split over `TOKEN_AXIS` of
    the mesh in force, which must divide it. Scores and sums are in promote_types(dtype, float32)."""
    return _forward(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, shape, form)[0]


class _Rows(NamedTuple):
    """What one device has of the keys' side: its own stretch, or another's that came round."""

    k_BKSH: Array
    v_BKSH: Array
    segment_ids_BS: Array


class _Sums(NamedTuple):
    """A softmax that is still open: the largest score so far, the sum of exponentials and of weighted values."""

    peak: Array
    total: Array
    mixed: Array


def _forward(q: Array, k: Array, v: Array, segment_ids: Array, shape: Shape, form: Form):
    heads, tokens = _partitions(q.shape[2], k.shape[2])
    rows = PartitionSpec(*heads[:2], heads[2], None, None)  # of sums, [B, T, K, G, 1]
    body = jax.shard_map(
        partial(_forward_stretch, shape=shape, form=form),
        in_specs=(heads, heads, heads, tokens),
        out_specs=(heads, rows, rows),
        check_vma=False,
    )
    out, peak, total = body(q, k, v, segment_ids)
    return out, (q, k, v, segment_ids, out, peak, total)


def _backward(shape: Shape, form: Form, saved: tuple[Array, ...], grad: Array):
    q, k, v, segment_ids, out, peak, total = saved
    heads, tokens = _partitions(q.shape[2], k.shape[2])
    rows = PartitionSpec(*heads[:2], heads[2], None, None)
    body = jax.shard_map(
        partial(_backward_stretch, shape=shape, form=form),
        in_specs=(heads, heads, heads, tokens, heads, rows, rows, heads),
        out_specs=(heads, heads, heads),
        check_vma=False,
    )
    return *body(q, k, v, segment_ids, out, peak, total, grad), None


attend_split.defvjp(_forward, _backward)


def _partitions(num_heads: int, num_kv_heads: int) -> tuple[PartitionSpec, PartitionSpec]:
    """(of [B, T, heads, H], of [B, T])."""
    return PartitionSpec(BATCH_AXES, TOKEN_AXIS, split_heads(num_heads, num_kv_heads), None), PartitionSpec(
        BATCH_AXES, TOKEN_AXIS
    )


def _forward_stretch(q: Array, k: Array, v: Array, segment_ids: Array, *, shape: Shape, form: Form):
    """On one device: (output [b, t, N, H], largest scores and sums [b, t, K, G, 1]) of its own queries."""
    queries = _grouped(q / math.sqrt(q.shape[-1]), k.shape[2])
    start = _Rows(k.swapaxes(1, 2), v.swapaxes(1, 2), segment_ids)
    wide = accumulate_dtype(v.dtype)
    sums = _Sums(
        jnp.full((*queries.shape[:4], 1), jnp.finfo(wide).min, wide),
        jnp.zeros((*queries.shape[:4], 1), wide),
        jnp.zeros(queries.shape, wide),
    )

    def add(sums: _Sums, rows: _Rows, first_key: Array | int) -> _Sums:
        scores = _masked(attention_scores(queries, rows.k_BKSH, shape), segment_ids, rows, first_key, shape)
        peak = jnp.maximum(sums.peak, scores.max(axis=-1, keepdims=True))
        weights, shrink = jnp.exp(scores - peak), jnp.exp(sums.peak - peak)
        return _Sums(
            peak,
            sums.total * shrink + weights.sum(axis=-1, keepdims=True),
            sums.mixed * shrink + attention_mix(weights, rows.v_BKSH),
        )

    for number, rows, first_key in _visits(start, shape, form):
        sums = _where_visible(number, lambda s, rows=rows, first=first_key: add(s, rows, first), sums, shape, form)
    out = (sums.mixed / sums.total).astype(v.dtype)
    return _ungrouped(out).reshape(q.shape), _ungrouped(sums.peak), _ungrouped(sums.total)


def _backward_stretch(
    q: Array, k: Array, v: Array, segment_ids: Array, out: Array, peak: Array, total: Array, grad: Array, *,
    shape: Shape, form: Form,
):  # fmt: skip
    """On one device: the gradients of its queries, and of its keys and values from the queries of all devices.

    The softmax is computed again from its largest scores and sums. Round the ring, the gradient of a stretch of keys
    travels with it, and comes home at the end.
    """
    num_kv_heads, wide = k.shape[2], accumulate_dtype(v.dtype)
    queries = _grouped(q / math.sqrt(q.shape[-1]), num_kv_heads)
    peaks, totals = _back(peak), _back(total)
    grads = _grouped(grad, num_kv_heads).astype(wide) / totals
    along = jnp.sum(grads * _grouped(out, num_kv_heads), axis=-1, keepdims=True)
    start = _Rows(k.swapaxes(1, 2), v.swapaxes(1, 2), segment_ids)

    def add(sums: tuple[Array, Array, Array], rows: _Rows, first_key: Array | int) -> tuple[Array, Array, Array]:
        scores = attention_scores(queries, rows.k_BKSH, shape)
        weights = jnp.exp(_masked(scores, segment_ids, rows, first_key, shape) - peaks)
        grad_scores = weights * (raw_scores(grads, rows.v_BKSH.astype(wide)) - along)
        if shape.logit_softcap is not None:
            grad_scores = grad_scores * (1.0 - jnp.square(scores / shape.logit_softcap))
        return (
            sums[0] + attention_mix(grad_scores, rows.k_BKSH),
            sums[1] + attention_gather(grad_scores, queries),
            sums[2] + attention_gather(weights, grads),
        )

    grad_q = jnp.zeros(queries.shape, wide)
    if form == "gather":
        rows = _gathered(start)
        zeros = jnp.zeros(rows.k_BKSH.shape, wide)
        grad_q, *grads_kv = add((grad_q, zeros, zeros), rows, 0)
        grads_kv = [jax.lax.psum_scatter(g, TOKEN_AXIS, scatter_dimension=2, tiled=True) for g in grads_kv]
    else:
        grads_kv = [jnp.zeros(start.k_BKSH.shape, wide) for _ in range(2)]
        rows, size, turns = start, axis_size(TOKEN_AXIS), num_visits(q.shape[1], axis_size(TOKEN_AXIS), shape)
        for number in range(turns):
            if number:
                rows, grads_kv = _sent((rows, grads_kv), 1)
            first = _first_key(number, q.shape[1])
            sums = (grad_q, *grads_kv)
            visit = lambda s, rows=rows, first=first: add(s, rows, first)  # noqa: E731
            grad_q, *grads_kv = _where_visible(number, visit, sums, shape, form)
        if turns > 1:
            grads_kv = _sent(grads_kv, size - (turns - 1))
    grad_q = _ungrouped(grad_q / math.sqrt(q.shape[-1])).reshape(q.shape).astype(q.dtype)
    return grad_q, *(g.astype(k.dtype).swapaxes(1, 2) for g in grads_kv)


def num_visits(stretch: int, size: int, shape: Shape) -> int:
    """Stretches of keys that a query may have to see, its own included: all, but causal windows end sooner.

    >>> num_visits(8, 4, Shape(True, None, None, 0)), num_visits(8, 4, Shape(True, 9, None, 0))
    (4, 2)
    >>> num_visits(8, 4, Shape(True, 10, None, 0)), num_visits(8, 4, Shape(True, 1, None, 0))
    (3, 1)
    """
    if not shape.is_causal or shape.window is None:
        return size
    return min(size, 1 + math.ceil((shape.window - 1) / stretch))


def _visits(start: _Rows, shape: Shape, form: Form):
    """(number, rows, position of their first key) of the stretches of keys that come by, the device's own first."""
    if form == "gather":
        yield 0, _gathered(start), 0
        return
    rows, stretch = start, start.segment_ids_BS.shape[1]
    for number in range(num_visits(stretch, axis_size(TOKEN_AXIS), shape)):
        rows = _sent(rows, 1) if number else rows
        yield number, rows, _first_key(number, stretch)


def _first_key(number: int, stretch: int) -> Array:
    """The position of the first key of the stretch that is here after `number` turns of the ring."""
    size = axis_size(TOKEN_AXIS)
    return (jax.lax.axis_index(TOKEN_AXIS) - number) % size * stretch


def _where_visible(number: int, visit, sums, shape: Shape, form: Form):
    """A causal query sees no stretch that lies behind its own: such a visit costs nothing."""
    if form == "gather" or number == 0 or not shape.is_causal:
        return visit(sums)
    return jax.lax.cond(jax.lax.axis_index(TOKEN_AXIS) >= number, visit, lambda sums: sums, sums)


def _sent(tree, turns: int):
    """Everything one device has, passed `turns` places on round the ring."""
    size = axis_size(TOKEN_AXIS)
    places = [(place, (place + turns) % size) for place in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, TOKEN_AXIS, places), tree)


def _gathered(rows: _Rows) -> _Rows:
    k, v = (jax.lax.all_gather(x, TOKEN_AXIS, axis=2, tiled=True) for x in rows[:2])
    return _Rows(k, v, jax.lax.all_gather(rows.segment_ids_BS, TOKEN_AXIS, axis=1, tiled=True))


def _masked(scores: Array, segment_ids_BT: Array, rows: _Rows, first_key: Array | int, shape: Shape) -> Array:
    """Scores [b, K, G, t, s] with the smallest number where a key is of another segment, later, or beyond the window."""
    stretch = segment_ids_BT.shape[1]
    queries = jax.lax.axis_index(TOKEN_AXIS) * stretch + jnp.arange(stretch)
    distance = queries[:, None] - (first_key + jnp.arange(rows.segment_ids_BS.shape[1]))[None, :]
    mask = segment_ids_BT[:, :, None] == rows.segment_ids_BS[:, None, :]
    if shape.is_causal:
        mask &= distance >= 0
    if shape.window is not None:
        mask &= jnp.abs(distance) < shape.window
    return jnp.where(mask[:, None, None], scores, jnp.finfo(scores.dtype).min)


def _grouped(x_BTNH: Array, num_kv_heads: int) -> Array:
    """[b, t, N, H] to [b, K, G, t, H]."""
    batch, num_tokens, num_heads, width = x_BTNH.shape
    return x_BTNH.reshape(batch, num_tokens, num_kv_heads, num_heads // num_kv_heads, width).transpose(0, 2, 3, 1, 4)


def _ungrouped(x_BKGTX: Array) -> Array:
    """[b, K, G, t, x] to [b, t, K, G, x], the layout whose tokens and heads the mesh splits; and `_back` again."""
    return x_BKGTX.transpose(0, 3, 1, 2, 4)


def _back(x_BTKGX: Array) -> Array:
    return x_BTKGX.transpose(0, 2, 3, 1, 4)
