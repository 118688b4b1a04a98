"""Weights in int8, a scale for each of their outputs, and products with them.

Reads `numerics.precision`; `compress.weights` quantizes with it, `models.quantized` multiplies. Symmetric rounding to the
nearest of 255 steps, as in Jacob et al. 2018 (arXiv:1712.05877) without their zero point. Weights are (out, in), and no
product has fewer than two rows: XLA's CPU compiler has fast int8 products for that, and slow loops for (in, out) weights
and for one row (docs/adr/0011-int8.md).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Int32

from jaxml.numerics.precision import accumulate_dtype

STEPS = 127  # on either side of zero
LIMB = 256  # a 16-bit integer is LIMB * high + low, both int8
FINE_STEPS = STEPS * LIMB + STEPS


def quantize_weights(weights: Float[Array, "*stack O I"]) -> tuple[Int8[Array, "*stack O I"], Float[Array, "*stack O"]]:
    """(values, scales float32) with values * scales off by at most half a scale, and scales at most (1 + 2^-7) / 127 of
    the largest magnitude of their row.

    Scales are rounded up to what bfloat16 holds, so that a model that computes in it has the same ones.
    """
    wide = weights.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(wide), axis=-1) / STEPS, jnp.uint32)
    upper = (bits + jnp.uint32(0xFFFF)) & jnp.uint32(0xFFFF0000)
    scales = _usable(jax.lax.bitcast_convert_type(upper, jnp.float32))
    return jnp.round(wide / scales[..., None]).astype(jnp.int8), scales


def dequantize(values: Int8[Array, "*stack O I"], scales: Float[Array, "*stack O"]) -> Float[Array, "*stack O I"]:
    """values * scales, in the dtype of the scales."""
    return values.astype(scales.dtype) * scales[..., None]


def int8_product(
    x: Float[Array, "*rows I"], values_OI: Int8[Array, "O I"], scales_O: Float[Array, " O"]
) -> Float[Array, "*rows O"]:
    """x W^T with each row of `x` rounded to int8 by its own largest magnitude, in promote_types(its dtype, float32).

    The sums are exact (int32), so a row's result depends on no other row, nor on how many there are. A row that is not
    finite gives a row that is not.
    """
    wide = accumulate_dtype(x.dtype)
    rounded, x_scales = _rounded(x.astype(wide), STEPS)
    sums = _integer_product(rounded.astype(jnp.int8), values_OI)
    return sums.astype(wide) * x_scales[..., None] * scales_O.astype(wide)


def weight_only_product(
    x: Float[Array, "*rows I"], values_OI: Int8[Array, "O I"], scales_O: Float[Array, " O"]
) -> Float[Array, "*rows O"]:
    """x W^T with `x` as it is, in promote_types(its dtype, float32).

    On CPUs, where to widen the weights takes longer than the product, each row of `x` is rounded to 16 bits instead and
    multiplied as two rows of int8: each of its numbers is off by at most 1 / 65,278 of its largest magnitude.
    """
    return jax.lax.platform_dependent(x, values_OI, scales_O, cpu=_two_limb_product, default=_widened_product)


def _two_limb_product(x: Array, values_OI: Array, scales_O: Array) -> Array:
    wide = accumulate_dtype(x.dtype)
    rounded, x_scales = _rounded(x.astype(wide), FINE_STEPS)
    whole = rounded.astype(jnp.int32)
    high = jnp.right_shift(whole + LIMB // 2, 8)
    limbs = jnp.stack([high, whole - LIMB * high]).astype(jnp.int8)
    high_sums, low_sums = _integer_product(limbs, values_OI).astype(wide)
    return (LIMB * high_sums + low_sums) * x_scales[..., None] * scales_O.astype(wide)


def _widened_product(x: Array, values_OI: Array, scales_O: Array) -> Array:
    wide = accumulate_dtype(x.dtype)
    over = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, values_OI.astype(x.dtype), over, preferred_element_type=wide) * scales_O.astype(wide)


def _integer_product(x: Int8[Array, "*rows I"], values_OI: Int8[Array, "O I"]) -> Int32[Array, "*rows O"]:
    rows = x.reshape(-1, x.shape[-1])
    both = jnp.concatenate([rows, rows]) if len(rows) == 1 else rows
    over = (((1,), (1,)), ((), ()))
    sums = jax.lax.dot_general(both, values_OI, over, preferred_element_type=jnp.int32)
    return sums[: len(rows)].reshape(*x.shape[:-1], -1)


def _rounded(x: Float[Array, "*rows I"], steps: int) -> tuple[Float[Array, "*rows I"], Float[Array, "*rows"]]:
    """(whole numbers from -steps to steps, scales) of each row."""
    scales = _usable(jnp.max(jnp.abs(x), axis=-1) / steps)
    return jnp.round(x / scales[..., None]), scales


def _usable(scales: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """1 where a row is zero, or so small that no normal number is its scale; NaN and infinities stay, so that results
    show them."""
    return jnp.where(scales < jnp.finfo(scales.dtype).tiny, jnp.ones((), scales.dtype), scales)
