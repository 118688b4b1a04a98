"""The feed-forward piece of a block: activations as functions, and the module that holds the matrices.

Reads `models.spec` and `models.parameters`; `models.decoder` uses it.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxml.keys import named_key
from jaxml.models.named import named
from jaxml.models.parameters import INIT_SCALE, Linear, Stack
from jaxml.models.spec import MlpSpec


def activate(name: str, up: Float[Array, "... F"], gate: Float[Array, "... F"] | None = None) -> Float[Array, "... F"]:
    """The hidden activation from the up projection and, for gated kinds, the gate projection.

    gelu:         up * Phi(up), exact, with erf          (Hendrycks & Gimpel 2016, arXiv:1606.08415)
    gelu_tanh:    its tanh approximation                 (the same, section 2; GPT-2)
    squared_relu: max(up, 0)^2                           (So et al. 2021, arXiv:2109.08668)
    swiglu:       gate * sigmoid(gate) * up              (Shazeer 2020, arXiv:2002.05202)
    geglu:        gelu_tanh(gate) * up                   (the same; the tanh form, as in Gemma)
    """
    if gate is None:
        return _activate_plain(name, up)
    return (_silu(gate) if name == "swiglu" else jax.nn.gelu(gate, approximate=True)) * up


def _activate_plain(name: str, up: Array) -> Array:
    match name:
        case "gelu":
            # In this order. jax.nn.gelu (by erfc) and up * (0.5 + 0.5 erf) take 1.5 times the CPU time of a whole
            # training step at width 128: XLA then computes the error function again and again.
            return 0.5 * up * (1.0 + jax.lax.erf(up * math.sqrt(0.5)))
        case "gelu_tanh":
            return jax.nn.gelu(up, approximate=True)
        case _:
            return jnp.square(jax.nn.relu(up))


def _silu(x: Array) -> Array:
    """x * sigmoid(x) by one division, which XLA's CPU compiler does not repeat as it does a logistic function.

    The exponent stops at 80, where the result is below 1e-34 of x, so that its gradient never meets infinity. float16 ends
    at exp(11), and the square of its own exponential, which the gradient of a division holds, at exp(5.5).
    """
    if x.dtype == jnp.float16:
        return jax.nn.silu(x)
    return x / (1.0 + jnp.exp(jnp.minimum(-x, 80.0)))


class Mlp(nnx.Module):
    """down(activate(up(x), gate(x))); the output projection starts smaller, by `residual_scale`."""

    def __init__(
        self, spec: MlpSpec, width: int, *, residual_scale: float, stack: Stack, key: Key[Array, ""], dtype: str
    ):
        def linear(name: str, num_in: int, num_out: int, axes: tuple[str, str], scale: float) -> Linear:
            return Linear(
                num_in,
                num_out,
                axes,
                has_bias=spec.has_bias,
                stack=stack,
                key=named_key(key, name),
                dtype=dtype,
                scale=scale,
            )

        self.spec = spec
        self.up = linear("up", width, spec.width, ("embed", "mlp"), INIT_SCALE)
        self.gate = linear("gate", width, spec.width, ("embed", "mlp"), INIT_SCALE) if spec.is_gated else None
        self.down = linear("down", spec.width, width, ("mlp", "embed"), INIT_SCALE * residual_scale)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = None if self.gate is None else self.gate(x_BTD)
        hidden_BTF = named(activate(self.spec.activation, self.up(x_BTD), gate), "mlp_hidden")
        return named(self.down(hidden_BTF), "mlp_output")
