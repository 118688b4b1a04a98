"""The leaves that models are made of: named, with logical axes and an initial distribution, and a linear map on them.

Reads `keys`, `devices.sharding` and `numerics.float8`; every module of `models` makes its parameters here. A value depends
on the run's key and the leaf's path only: not on the mesh, not on the order of construction, not on scanned or unrolled
execution. It is drawn in float32 and then cast, so that the same seed gives the same model in every precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxml.devices.sharding import TOKEN_AXIS, axis_size
from jaxml.keys import named_key
from jaxml.numerics.float8 import float8_product

INIT_SCALE = 0.02  # standard deviation of kernels and embeddings (GPT-2: Radford et al. 2019)


def normal(
    key: Key[Array, ""], shape: Sequence[int], axes: Sequence[str | None], scale: float, dtype: str
) -> nnx.Param:
    """A parameter drawn from a normal distribution with standard deviation `scale`; `axes` name its dimensions."""
    value = scale * jax.random.normal(key, tuple(shape), jnp.float32)
    return nnx.Param(value.astype(dtype), logical=tuple(axes))


def constant(value: float, shape: Sequence[int], axes: Sequence[str | None], dtype: str) -> nnx.Param:
    """A parameter that starts at one value everywhere: 1 for scales, 0 for biases."""
    return nnx.Param(jnp.full(tuple(shape), value, dtype), logical=tuple(axes))


class Stack:
    """How the leaves of a module are stacked: `depth` layers in front of every shape, or none (`depth` None)."""

    def __init__(self, depth: int | None = None):
        self.shape: tuple[int, ...] = () if depth is None else (depth,)
        self.axes: tuple[str | None, ...] = () if depth is None else ("layers",)


def dense(x: Float[Array, "... I"], kernel_IO: Float[Array, "I O"]) -> Float[Array, "... O"]:
    """x W, as one product of two matrices: XLA's CPU compiler is slower with more dimensions.

    Where the mesh in force splits tokens the dimensions stay: merged with split rows they would have to be gathered.
    """
    return x @ kernel_IO if is_token_split() else _dense_flat(x, kernel_IO)


def is_token_split() -> bool:
    """Whether the mesh that `jax.set_mesh` put in force splits the tokens of a row."""
    return axis_size(TOKEN_AXIS) > 1


@jax.custom_vjp
def _dense_flat(x: Array, kernel_IO: Array) -> Array:
    return (x.reshape(-1, x.shape[-1]) @ kernel_IO).reshape(*x.shape[:-1], -1)


def _dense_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, kernel_IO = saved
    rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    grad_kernel = jax.lax.platform_dependent(
        rows,
        grad_rows,
        # The barrier makes the transpose an array of its own: XLA's CPU compiler sends a product with a transposed left
        # side to a slower library.
        cpu=lambda rows, grad_rows: jax.lax.optimization_barrier(rows.T) @ grad_rows,
        default=lambda rows, grad_rows: rows.T @ grad_rows,
    )
    return (grad_rows @ kernel_IO.T).reshape(x.shape), grad_kernel


_dense_flat.defvjp(lambda x, kernel_IO: (_dense_flat(x, kernel_IO), (x, kernel_IO)), _dense_backward)


def dense_out_in(x: Float[Array, "... I"], kernel_OI: Float[Array, "O I"], dtype: Any = None) -> Float[Array, "... O"]:
    """x W^T, in `dtype` (None: that of x). Not for training.

    On CPUs as W x^T between barriers: left alone, XLA's CPU compiler makes it a product with a transposed right side, which
    takes up to three times as long for 2 to 32 rows (docs/adr/0006-decoding-layout-and-batch.md).
    """
    rows = x.reshape(-1, x.shape[-1])

    def upright(rows: Array, kernel_OI: Array) -> Array:
        columns = jax.lax.optimization_barrier(rows.T)
        return jax.lax.optimization_barrier(jnp.matmul(kernel_OI, columns, preferred_element_type=dtype)).T

    def plain(rows: Array, kernel_OI: Array) -> Array:
        return jax.lax.dot_general(rows, kernel_OI, (((1,), (1,)), ((), ())), preferred_element_type=dtype)

    y = jax.lax.platform_dependent(rows, kernel_OI, cpu=upright, default=plain)
    return y.reshape(*x.shape[:-1], -1)


class Linear(nnx.Module):
    """y = x W (+ b), W stored as (in, out); one layer of the stack once sliced. `use_float8` sets `is_float8`, and
    `unrolled.for_decoding` `is_out_in`, whose W is stored as (out, in)."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        axes: tuple[str | None, str | None],
        *,
        has_bias: bool,
        stack: Stack,
        key: Key[Array, ""],
        dtype: str,
        scale: float = INIT_SCALE,
    ):
        self.is_float8 = self.is_out_in = False
        kernel_shape, kernel_axes = (*stack.shape, num_in, num_out), (*stack.axes, *axes)
        self.kernel = normal(named_key(key, "kernel"), kernel_shape, kernel_axes, scale, dtype)
        self.bias = constant(0.0, (*stack.shape, num_out), (*stack.axes, axes[1]), dtype) if has_bias else None

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        multiply = dense_out_in if self.is_out_in else float8_product if self.is_float8 else dense
        y = multiply(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...]


def use_float8(blocks: nnx.Module) -> None:
    """Make the products of every linear map in `blocks` in float8, for a pass of training.

    Only the blocks: embedding and head stay in the compute dtype, as they do in every float8 recipe that we know, and so
    do evaluation, the sealed probe and decoding, which never call this. So what is measured is what is served, and a
    checkpoint opens without Qwix.
    """
    for _, module in nnx.iter_modules(blocks):
        if isinstance(module, Linear):
            module.is_float8 = True
