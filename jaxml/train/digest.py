"""64-bit digests of the batch, the gradients and the parameters of a step: what two runs that should be equal compare.

Reads `trees`; `train.step` computes them inside its jit when `train.digests` is on and brings them to the host as
hexadecimal text, `prove.diverge` compares those of two runs. Every element becomes a 32-bit word that is mixed with
its place (the finaliser of MurmurHash3, Appleby 2011), and the mixed words are added modulo 2^32: addition in whole
numbers is associative, so no sharding and no order of reduction changes the sum. Two mixers give the two halves; 64-bit
types, which JAX has switched off, are not needed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt32

from jaxml import trees

# The metrics that a step with `train.digests` has, in the order in which a step makes what they stand for.
DIGESTS = ("digest_batch", "digest_gradients", "digest_params")
# Odd, so that a product with them modulo 2^32 loses nothing: of the golden ratio (Knuth), and of MurmurHash3.
PLACE, FIRST, SECOND, THIRD = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F


def digests(batch: Mapping[str, Array], gradients: Any, params: Any) -> dict[str, UInt32[Array, " 2"]]:
    """The three digests of a step, by the names in DIGESTS. Pure; called inside jit, on arrays of any sharding.

    `batch`: the columns on the device (`record` and `source` stay on the host). `gradients`: as they are after the
    reduction over all devices and microbatches, unscaled and before clipping. `params`: after the update.
    Two digests are equal exactly when every bit is (but for one chance in 2^64). So on another mesh the batch keeps its
    digest, and the gradients do not: there the reductions round in another order.
    """
    return dict(zip(DIGESTS, (digest(batch), digest(gradients), digest(params)), strict=True))


def digest(tree: Any) -> UInt32[Array, " 2"]:
    """The digest of all leaves, with their names and places: 0.0 and -0.0 differ, and so do two leaves exchanged.

    >>> to_hex(jax.device_get(digest({"a": jnp.arange(3)})))
    'd03fe458ad1cac60'
    """
    total = jnp.zeros(2, jnp.uint32)
    for path, leaf in trees.flatten(tree).items():
        name = zlib.crc32(path.encode())
        salts = np.array([name, ~name & 0xFFFFFFFF], np.uint32)
        total = total + _mix(_mix(_sums(words_of(leaf)) ^ salts, FIRST, 16), SECOND, 13)
    return total


def words_of(leaf: Shaped[Array, "*shape"]) -> UInt32[Array, "*words"]:
    """The bits of each element as a 32-bit word; elements of 64 bits become two along a new last dimension."""
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint32)
    is_real = jnp.issubdtype(leaf.dtype, jnp.floating)
    bits = int(jnp.finfo(leaf.dtype).bits if is_real else jnp.iinfo(leaf.dtype).bits)
    word = jnp.dtype(f"uint{min(bits, 32)}")
    return jax.lax.bitcast_convert_type(leaf, word).astype(jnp.uint32)


def to_hex(words: UInt32[np.ndarray, " 2"]) -> str:
    """Sixteen hexadecimal digits, as metrics.jsonl has them."""
    return "".join(f"{int(word):08x}" for word in words)


def _sums(words: UInt32[Array, "*words"]) -> UInt32[Array, " 2"]:
    """The two sums over all words of a leaf, each word mixed with its place (row-major, modulo 2^32).

    One reduction with two results, first of all dimensions but one: XLA's CPU compiler makes a vector loop of it on
    several threads, ten times as fast as two sums.
    """
    place = jnp.zeros((), jnp.uint32)
    for dim in range(words.ndim):
        stride = math.prod(words.shape[dim + 1 :]) * PLACE % 2**32
        place = place + jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * np.uint32(stride)
    begun = _mix(words ^ place, FIRST, 16)
    pair = tuple(_last(_mix(begun, factor, shift)) for factor, shift in ((SECOND, 13), (THIRD, 15)))
    for dims in (range(1, words.ndim), range(min(words.ndim, 1))):
        pair = jax.lax.reduce(pair, (np.uint32(0), np.uint32(0)), _add_pairs, tuple(dims))
    return jnp.stack(pair)


def _add_pairs(one: Any, other: Any) -> Any:
    return one[0] + other[0], one[1] + other[1]


def _last(words: UInt32[Array, "*words"]) -> UInt32[Array, "*words"]:
    return words ^ (words >> 16)


def _mix(words: UInt32[Array, "*words"], factor: int, shift: int) -> UInt32[Array, "*words"]:
    """One round: the high bits folded onto the low ones, and a product that carries them up again (a bijection)."""
    return (words ^ (words >> shift)) * np.uint32(factor)
