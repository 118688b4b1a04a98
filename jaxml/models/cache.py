"""Keys and values of the tokens seen so far, and attention of new tokens over them.

Reads `models.spec` and `numerics.precision`; `models.attention` writes and reads a layer of the cache,
`models.decoder.Decoder.extend` the whole, `infer` owns it. A cache is an immutable pytree: `extended` returns a new one,
and under `jit` with donation XLA updates it in place. `models.paged` has the other kind, whose rows share pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxml.models.spec import DecoderSpec
from jaxml.numerics.precision import accumulate_dtype

Start = Int[Array, ""] | Int[Array, " B"]


@runtime_checkable
class KeyValueCache(Protocol):
    """What `Decoder.extend` needs of a cache."""

    def extended(
        self,
        layer: int,
        q_BTNH: Float[Array, "B T N H"],
        k_BTKH: Float[Array, "B T K H"],
        v_BTKH: Float[Array, "B T K H"],
        start: Start,
        window: int | None,
        logit_softcap: float | None,
    ) -> tuple[Float[Array, "B T N H"], Any]:
        """(attention of the new queries over a layer's keys and values, the new ones among them; the cache with those).

        `start`: the position of the first new token, one for all rows or one a row. A query sees what is not later than
        itself, and nearer than `window`.
        """
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """keys, values: one [B, S, K, H] array a layer, in order (K and H are the layer's own).

    Slot s of a row holds its token at position s; what lies beyond the tokens of a row is never seen.
    """

    keys: tuple[Float[Array, "B S _K _H"], ...]
    values: tuple[Float[Array, "B S _K _H"], ...]

    @property
    def num_rows(self) -> int:
        return self.keys[0].shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold (S)."""
        return self.keys[0].shape[1]

    def extended(
        self,
        layer: int,
        q_BTNH: Float[Array, "B T N H"],
        k_BTKH: Float[Array, "B T K H"],
        v_BTKH: Float[Array, "B T K H"],
        start: Start,
        window: int | None,
        logit_softcap: float | None,
    ) -> tuple[Float[Array, "B T N H"], Cache]:
        """See `KeyValueCache`; start + T must not exceed the capacity."""
        keys, values = written(self.keys[layer], k_BTKH, start), written(self.values[layer], v_BTKH, start)
        mask_BTS = visible(positions_of(start, *k_BTKH.shape[:2]), self.capacity, window)
        mixed_BTNH = attend_cached(q_BTNH, keys, values, mask_BTS, logit_softcap)
        new_keys = (*self.keys[:layer], keys, *self.keys[layer + 1 :])
        new_values = (*self.values[:layer], values, *self.values[layer + 1 :])
        return mixed_BTNH, Cache(new_keys, new_values)


def empty_cache(spec: DecoderSpec, num_rows: int, capacity: int, dtype: Any) -> Cache:
    """A cache of zeros for `num_rows` rows of at most `capacity` tokens."""
    blocks = [spec.blocks[layer % len(spec.blocks)].attention for layer in range(spec.num_layers)]
    shapes = [(num_rows, capacity, attention.num_kv_heads, attention.head_width) for attention in blocks]
    keys, values = ([jnp.zeros(shape, dtype) for shape in shapes] for _ in range(2))
    return Cache(tuple(keys), tuple(values))


def positions_of(start: Start, num_rows: int, num_tokens: int) -> Int[Array, "B T"]:
    """The positions of `num_tokens` new tokens a row, the first at `start` (one for all rows, or one a row)."""
    return jnp.broadcast_to(start, (num_rows,))[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)


def written(
    cached_BSKH: Float[Array, "B S K H"], new_BTKH: Float[Array, "B T K H"], start: Start
) -> Float[Array, "B S K H"]:
    """The cached array with the new entries from slot `start` on; start + T must not exceed S.

    Row by row where rows start apart: a scatter, which would do it at once, is slow on CPUs.
    """
    zero = jnp.zeros((), start.dtype)
    if start.ndim == 0:
        return jax.lax.dynamic_update_slice(cached_BSKH, new_BTKH, (zero, start, zero, zero))
    for row in range(new_BTKH.shape[0]):
        place = (zero + row, start[row], zero, zero)
        cached_BSKH = jax.lax.dynamic_update_slice(cached_BSKH, new_BTKH[row : row + 1], place)
    return cached_BSKH


def visible(positions_BT: Int[Array, "B T"], capacity: int, window: int | None) -> Bool[Array, "B T S"]:
    """The slots that a query at each position sees: not later than itself, and nearer than `window`."""
    slots_S = jnp.arange(capacity, dtype=jnp.int32)
    mask_BTS = slots_S <= positions_BT[..., None]
    if window is not None:
        mask_BTS &= slots_S > positions_BT[..., None] - window
    return mask_BTS


def attend_cached(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "B T S"],
    logit_softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """`attention.attend` of new queries over cached keys, of which each query sees those in its mask (one at least)."""
    batch, num_tokens, num_heads, head_width = q_BTNH.shape
    wide = accumulate_dtype(q_BTNH.dtype)
    q_BTKGH = (q_BTNH / math.sqrt(head_width)).reshape(batch, num_tokens, k_BSKH.shape[2], -1, head_width)
    scores_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=wide)
    if logit_softcap is not None:
        scores_BKGTS = logit_softcap * jnp.tanh(scores_BKGTS / logit_softcap)
    weights_BKGTS = jax.nn.softmax(jnp.where(mask_BTS[:, None, None], scores_BKGTS, -jnp.inf), axis=-1)
    mixed = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS.astype(v_BSKH.dtype), v_BSKH, preferred_element_type=wide)
    return mixed.astype(q_BTNH.dtype).reshape(batch, num_tokens, num_heads, head_width)
