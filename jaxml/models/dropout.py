"""Dropout whose masks belong to rows, so that neither batch split nor sharding nor accumulation changes them.

Reads no other jaxml file; the decoder (embeddings) and its blocks (both branches) use it.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

SITES = ("embedding", "attention", "mlp")
LEVELS = 2**16  # masks are drawn from 16 random bits an element, half the cost of 32


def drop(
    x_BTD: Float[Array, "B T D"],
    keys_B: Key[Array, " B"] | None,
    rate: float,
    site: Literal["embedding", "attention", "mlp"],
    layer: int | Int[Array, ""] = 0,
) -> Float[Array, "B T D"]:
    """Inverted dropout (Srivastava et al. 2014): zeroes elements and scales the others by 1 / (kept fraction).

    Row b's mask is a function of keys_B[b], the site and the layer. `rate` is rounded to multiples of 2^-16. With no
    keys or a rate of 0 it returns `x_BTD` itself.
    """
    if keys_B is None or rate == 0.0:
        return x_BTD
    kept_levels = round((1.0 - rate) * LEVELS)

    def row_mask(key: Key[Array, ""]) -> Array:
        key = jax.random.fold_in(key, layer * len(SITES) + SITES.index(site))
        return jax.random.bits(key, x_BTD.shape[1:], jnp.uint16) < kept_levels

    scale = jnp.asarray(LEVELS / kept_levels, x_BTD.dtype)
    return jnp.where(jax.vmap(row_mask)(keys_B), x_BTD * scale, jnp.zeros((), x_BTD.dtype))
