"""Normalisation over the last dimension: LayerNorm and RMSNorm, as a function and as the module that holds its leaves.

Reads `models.spec`, `models.parameters` and `numerics.precision`; blocks, the final norm and QK-norm use it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxml.models.parameters import Stack, constant
from jaxml.models.spec import NormSpec
from jaxml.numerics.precision import accumulate_dtype


def normalize(
    x: Float[Array, "... D"], spec: NormSpec, scale_D: Float[Array, " D"], bias_D: Float[Array, " D"] | None = None
) -> Float[Array, "... D"]:
    """Statistics and arithmetic in promote_types(dtype of x, float32), the result in the dtype of x.

    layer: (x - mean) / sqrt(var + epsilon) * scale + bias   (Ba, Kiros & Hinton 2016, arXiv:1607.06450)
    rms:   x / sqrt(mean(x^2) + epsilon) * scale + bias      (Zhang & Sennrich 2019, arXiv:1910.07467)
    """
    wide = x.astype(accumulate_dtype(x.dtype))
    if spec.kind == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    mean_square = jnp.square(wide).mean(-1, keepdims=True)
    y = wide * jax.lax.rsqrt(mean_square + spec.epsilon) * scale_D.astype(wide.dtype)
    if bias_D is not None:
        y = y + bias_D.astype(wide.dtype)
    return y.astype(x.dtype)


class Norm(nnx.Module):
    """`normalize` with its scale (ones at first) and, if the spec has one, its bias (zeros)."""

    def __init__(self, spec: NormSpec, width: int, axis: str | None, *, stack: Stack, dtype: str):
        self.spec = spec
        self.scale = constant(1.0, (*stack.shape, width), (*stack.axes, axis), dtype)
        self.bias = constant(0.0, (*stack.shape, width), (*stack.axes, axis), dtype) if spec.has_bias else None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return normalize(x, self.spec, self.scale[...], None if self.bias is None else self.bias[...])
