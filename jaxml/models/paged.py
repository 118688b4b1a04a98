"""Keys and values in pages, and attention of new tokens over the pages of their row.

Reads `models.cache` and `numerics.precision`; `models.decoder.Decoder.extend` uses it in place of the contiguous cache,
`infer.pages` says which page belongs to whom, `infer.runner` owns the arrays.

Attention goes over a row's pages a few at a time with the softmax of Milakov and Gimelshein 2018 (arXiv:1805.02867), so
nothing of the size of the cache is copied, and the number of turns follows the longest row. A turn in which a row sees
nothing leaves it exactly as it was. What a row does not see may hold anything, not-a-numbers too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxml.models.cache import Start, positions_of
from jaxml.models.spec import DecoderSpec
from jaxml.numerics.precision import accumulate_dtype

# Bytes of keys that a turn reads for all rows together: they and the values stay in a core's cache.
TURN_BYTES = 2**20
MAX_TURN_TOKENS = 256
# Below any score that a model gives; finite, so that a row that has seen nothing yet has no infinity to subtract.
LEAST = -1e30


class Pools(NamedTuple):
    """The pages of all layers: keys and values of a `PagedCache`."""

    keys: tuple[Float[Array, "A _K P _H"], ...]
    values: tuple[Float[Array, "A _K P _H"], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """keys, values: one [A, K, P, H] array a layer: A pages of P slots (K and H are the layer's own).

    Slot s % P of page `table_BM[b, s // P]` holds the token of row b at position s. Entries of the table for pages that a
    row does not have are 0: page 0 takes what nobody reads. The table is wider than a row's longest text by one piece.
    """

    keys: tuple[Float[Array, "A _K P _H"], ...]
    values: tuple[Float[Array, "A _K P _H"], ...]
    table_BM: Int[Array, "B M"]

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[2]

    def extended(
        self,
        layer: int,
        q_BTNH: Float[Array, "B T N H"],
        k_BTKH: Float[Array, "B T K H"],
        v_BTKH: Float[Array, "B T K H"],
        start: Start,
        window: int | None,
        logit_softcap: float | None,
    ) -> tuple[Float[Array, "B T N H"], PagedCache]:
        """As `Cache.extended`. More than one token a row: T is a multiple of the page size, and `start` too."""
        first_B = jnp.broadcast_to(start, k_BTKH.shape[:1])
        keys = _written(self.keys[layer], k_BTKH, self.table_BM, first_B)
        values = _written(self.values[layer], v_BTKH, self.table_BM, first_B)
        positions_BT = positions_of(first_B, *k_BTKH.shape[:2])
        mixed = attend_pages(q_BTNH, keys, values, self.table_BM, positions_BT, window, logit_softcap)
        new_keys = (*self.keys[:layer], keys, *self.keys[layer + 1 :])
        new_values = (*self.values[:layer], values, *self.values[layer + 1 :])
        return mixed, replace(self, keys=new_keys, values=new_values)


def empty_pages(spec: DecoderSpec, num_pages: int, page_size: int, dtype: Any) -> Pools:
    """`num_pages` pages of zeros, and page 0."""
    blocks = [spec.blocks[layer % len(spec.blocks)].attention for layer in range(spec.num_layers)]
    shapes = [(num_pages + 1, attention.num_kv_heads, page_size, attention.head_width) for attention in blocks]
    keys, values = (tuple(jnp.zeros(shape, dtype) for shape in shapes) for _ in range(2))
    return Pools(keys, values)


def page_bytes(spec: DecoderSpec, page_size: int, dtype: Any) -> int:
    """Bytes of one page: keys and values of all layers."""
    blocks = [spec.blocks[layer % len(spec.blocks)].attention for layer in range(spec.num_layers)]
    return sum(2 * block.num_kv_heads * page_size * block.head_width * jnp.dtype(dtype).itemsize for block in blocks)


def attend_pages(
    q_BTNH: Float[Array, "B T N H"],
    keys_AKPH: Float[Array, "A K P H"],
    values_AKPH: Float[Array, "A K P H"],
    table_BM: Int[Array, "B M"],
    positions_BT: Int[Array, "B T"],
    window: int | None,
    logit_softcap: float | None,
) -> Float[Array, "B T N H"]:
    """`attention.attend` of each query over the slots of its row's pages up to its own position (and within `window`)."""
    num_rows, num_tokens, num_heads, head_width = q_BTNH.shape
    num_kv_heads, page_size = keys_AKPH.shape[1:3]
    wide = accumulate_dtype(q_BTNH.dtype)
    q_BTKGH = (q_BTNH / math.sqrt(head_width)).reshape(num_rows, num_tokens, num_kv_heads, -1, head_width)
    turn_pages = pages_a_turn(num_rows, keys_AKPH[0].size * keys_AKPH.dtype.itemsize, page_size)
    turn_slots = turn_pages * page_size
    last_B1 = positions_BT.max(1, keepdims=True)
    table_BM = jnp.pad(table_BM, ((0, 0), (0, -table_BM.shape[1] % turn_pages)))
    first = 0 if window is None else jnp.maximum(positions_BT.min() - window + 1, 0) // turn_slots

    def turn(index: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        most_BKGT, total_BKGT, mixed_BKGTH = carry
        pages_Bn = jax.lax.dynamic_slice_in_dim(table_BM, index * turn_pages, turn_pages, axis=1)
        slots_S = index * turn_slots + jnp.arange(turn_slots, dtype=jnp.int32)
        keys_BnKPH, values_BnKPH = keys_AKPH[pages_Bn], values_AKPH[pages_Bn]
        # Zero times what nobody sees must be zero, whatever it is.
        is_written = (slots_S <= last_B1).reshape(num_rows, turn_pages, 1, page_size, 1)
        values_BnKPH = jnp.where(is_written, values_BnKPH, 0)
        scores = jnp.einsum("BTKGH,BnKPH->BKGTnP", q_BTKGH, keys_BnKPH, preferred_element_type=wide)
        scores_BKGTS = scores.reshape(*scores.shape[:4], turn_slots)
        if logit_softcap is not None:
            scores_BKGTS = logit_softcap * jnp.tanh(scores_BKGTS / logit_softcap)
        seen_BTS = slots_S <= positions_BT[..., None]
        if window is not None:
            seen_BTS &= slots_S > positions_BT[..., None] - window
        seen_B11TS = seen_BTS[:, None, None]
        new_most = jnp.maximum(most_BKGT, jnp.where(seen_B11TS, scores_BKGTS, LEAST).max(-1))
        weights_BKGTS = jnp.where(seen_B11TS, jnp.exp(scores_BKGTS - new_most[..., None]), 0)
        weights = weights_BKGTS.astype(values_BnKPH.dtype).reshape(*scores.shape[:4], turn_pages, page_size)
        more = jnp.einsum("BKGTnP,BnKPH->BKGTH", weights, values_BnKPH, preferred_element_type=wide)
        kept_BKGT = jnp.exp(most_BKGT - new_most)
        return new_most, total_BKGT * kept_BKGT + weights_BKGTS.sum(-1), mixed_BKGTH * kept_BKGT[..., None] + more

    shape = (num_rows, num_kv_heads, num_heads // num_kv_heads, num_tokens)
    zero = (jnp.full(shape, LEAST, wide), jnp.zeros(shape, wide), jnp.zeros((*shape, head_width), wide))
    num_turns = positions_BT.max() // turn_slots + 1
    _, total_BKGT, mixed_BKGTH = jax.lax.fori_loop(first, num_turns, turn, zero)
    mixed_BTKGH = jnp.moveaxis(mixed_BKGTH / total_BKGT[..., None], 3, 1)
    return mixed_BTKGH.astype(q_BTNH.dtype).reshape(num_rows, num_tokens, num_heads, head_width)


def pages_a_turn(num_rows: int, bytes_a_page: int, page_size: int) -> int:
    """How many pages of each row a turn of `attend_pages` reads.

    >>> pages_a_turn(1, 49152, 16), pages_a_turn(32, 49152, 16), pages_a_turn(1, 2048, 16)
    (16, 1, 16)
    """
    return max(1, min(TURN_BYTES // (num_rows * bytes_a_page), MAX_TURN_TOKENS // page_size))


def _written(
    pages_AKPH: Float[Array, "A K P H"],
    new_BTKH: Float[Array, "B T K H"],
    table_BM: Int[Array, "B M"],
    first_B: Int[Array, " B"],
) -> Float[Array, "A K P H"]:
    """The pages with the new entries from slot `first_B` of each row on: one slot a row, or whole pages.

    Entry by entry: a scatter, which would do it at once, is slow on CPUs.
    """
    page_size = pages_AKPH.shape[2]
    num_rows, num_tokens = new_BTKH.shape[:2]
    zero = jnp.int32(0)
    page_B, slot_B = first_B // page_size, first_B % page_size
    if num_tokens == 1:
        page_B = jnp.take_along_axis(table_BM, page_B[:, None], axis=1)[:, 0]
        for row in range(num_rows):
            entry = new_BTKH[row].swapaxes(0, 1)[None]
            pages_AKPH = jax.lax.dynamic_update_slice(pages_AKPH, entry, (page_B[row], zero, slot_B[row], zero))
        return pages_AKPH
    for row in range(num_rows):
        for index in range(num_tokens // page_size):
            entry = new_BTKH[row, index * page_size : (index + 1) * page_size].swapaxes(0, 1)[None]
            page = table_BM[row, page_B[row] + index]
            pages_AKPH = jax.lax.dynamic_update_slice(pages_AKPH, entry, (page, zero, zero, zero))
    return pages_AKPH
