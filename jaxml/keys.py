"""Random keys that are a pure function of (seed, purpose, step, row): nothing random is carried in a state.

Reads no other jaxml file; `train.step` and `models` draw from these. A resumed, accumulated or resharded run derives
the same keys, so it draws the same numbers. Keys are always threefry, whose values do not depend on how an array is
sharded.
"""

from __future__ import annotations

import zlib

import jax
from jaxtyping import Array, Int, Key


def root_key(seed: int) -> Key[Array, ""]:
    """The root key of a run. Seeds are taken modulo 2^32."""
    return jax.random.key(seed % 2**32, impl="threefry2x32")


def named_key(key: Key[Array, ""], name: str) -> Key[Array, ""]:
    """The key for `name` under `key` (fold_in of the name's CRC-32): adding a name never changes another's numbers."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def step_key(seed: int, step: int | Int[Array, ""], purpose: str) -> Key[Array, ""]:
    """The key for one purpose (such as "dropout") at one global step, which may be traced.

    >>> bool((step_key(0, 3, "dropout") == step_key(0, 3, "shuffle")).all())
    False
    """
    return jax.random.fold_in(named_key(root_key(seed), purpose), step)


def row_keys(key: Key[Array, ""], rows_B: Int[Array, " B"]) -> Key[Array, " B"]:
    """One key for each row of a batch, from its row number within the global batch."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows_B)
