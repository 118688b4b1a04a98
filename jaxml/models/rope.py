"""Rotary position embeddings.

Reads `models.spec`; the decoder computes the angles once a forward pass, `models.attention` turns queries and keys by
them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxml.models.spec import RopeSpec

Rotation = tuple[Array, Array]  # cosines and sines, [B, T, 1, H/2] each


def rotation(positions_BT: Int[Array, "B T"], head_width: int, spec: RopeSpec, dtype: jnp.dtype) -> Rotation:
    """Cosines and sines of position * base^(-2i/H) for i in 0..H/2-1 (Su et al. 2021, arXiv:2104.09864, eq. 15)."""
    frequencies = spec.base ** (-jnp.arange(0, head_width, 2, dtype=dtype) / head_width)
    angles = positions_BT[:, :, None, None].astype(dtype) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTNH: Float[Array, "B T N H"], turn: Rotation) -> Float[Array, "B T N H"]:
    """Turns the pairs (x[i], x[i + H/2]), the pairing of GPT-NeoX and Llama, in the dtype of the rotation."""
    cosines, sines = turn
    first, second = jnp.split(x_BTNH.astype(cosines.dtype), 2, axis=-1)
    turned = jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return turned.astype(x_BTNH.dtype)
