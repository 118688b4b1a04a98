"""A matrix product in float8 with its gradient: e4m3 for what is known before the step, e5m2 for incoming gradients.

Reads `errors` and `numerics.precision`; `models.parameters` calls it for the training products of the blocks. The
formats: Micikevicius et al. 2022 (arXiv:2209.05433). Values are quantized by Qwix (the extra `float8`), by the absolute
maximum of each row of activations and each column of a kernel, taken anew in every step. The operands of the product are
float8 arrays; the scales are applied to its result. Whether the arithmetic is in float8 too is the backend's matter:
XLA for CPUs, which have no such instructions, widens the operands inside the compiled product.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxml.errors import require_extra
from jaxml.numerics.precision import accumulate_dtype

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


def require_float8() -> Any:
    """Qwix. Raises MissingExtraError when it is not installed."""
    return require_extra("qwix", "float8")


@jax.custom_vjp
def float8_product(x: Float[Array, "... I"], kernel_IO: Float[Array, "I O"]) -> Float[Array, "... O"]:
    """x W with both sides rounded to e4m3, in the dtype of `x`, added up in promote_types(that, float32).

    In the gradient the incoming side is e5m2, which has the wider range, and the other side is the e4m3 of the forward
    pass: one byte an element is all that is kept for it. Its scales lie along the dimension that the gradient sums over,
    so they go into the incoming gradient before that is rounded. Rounding itself counts as the identity
    (straight-through: Bengio et al. 2013, arXiv:1308.3432). Raises MissingExtraError without Qwix.
    """
    return _forward(x, kernel_IO)[0]


def _forward(x: Array, kernel_IO: Array) -> tuple[Array, tuple[Any, Any]]:
    qwix, wide = require_float8(), accumulate_dtype(x.dtype)
    x8 = qwix.quantize(x, FORWARD, channelwise_axes=tuple(range(x.ndim - 1)))
    kernel8_IO = qwix.quantize(kernel_IO, FORWARD, channelwise_axes=(1,))
    over = (((x.ndim - 1,), (0,)), ((), ()))
    return qwix.dot_general(x8, kernel8_IO, over, preferred_element_type=wide).astype(x.dtype), (x8, kernel8_IO)


def _backward(saved: tuple[Any, Any], grad: Array) -> tuple[Array, Array]:
    qwix, wide = require_float8(), accumulate_dtype(grad.dtype)
    x8, kernel8_IO = saved
    rows, last = tuple(range(grad.ndim - 1)), grad.ndim - 1
    grad8 = qwix.quantize(grad * kernel8_IO.scale[0], BACKWARD, channelwise_axes=rows)
    over = (((last,), (1,)), ((), ()))
    grad_x = qwix.dot_general(grad8, kernel8_IO.qvalue, over, preferred_element_type=wide)
    grad8 = qwix.quantize(grad * x8.scale, BACKWARD, channelwise_axes=(last,))
    grad_kernel_IO = qwix.dot_general(x8.qvalue, grad8, ((rows, rows), ((), ())), preferred_element_type=wide)
    return grad_x.astype(x8.scale.dtype), grad_kernel_IO.astype(kernel8_IO.scale.dtype)


float8_product.defvjp(_forward, _backward)
