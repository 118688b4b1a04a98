"""Activations at their extremes, where the forms that are fast on a CPU could go wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml.models.mlp import activate

REFERENCES = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_values_and_slopes_equal_those_of_jax_and_stay_finite_far_out(name):
    x = jnp.concatenate([jnp.linspace(-6.0, 6.0, 49), jnp.array([-1e4, -200.0, -90.0, 90.0, 1e4])])

    def total(f):
        return lambda x: (f(x).sum(), f(x))

    ours = (
        (lambda x: activate(name, jnp.ones_like(x), x))
        if name in ("swiglu", "geglu")
        else (lambda x: activate(name, x))
    )
    slopes, values = jax.jit(jax.grad(total(ours), has_aux=True))(x)
    expected_slopes, expected = jax.jit(jax.grad(total(REFERENCES[name]), has_aux=True))(x)
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(slopes, expected_slopes, rtol=1e-5, atol=2e-6)


def test_the_slope_of_swiglu_in_float16_is_that_of_float32():
    """float16 ends at exp(11): an exponential of its own would be infinite, and the slope NaN."""
    x = jnp.concatenate([jnp.linspace(-12.0, 6.0, 49), jnp.array([-1e3, -90.0, 90.0])])

    def slopes(dtype):
        return jax.grad(lambda x: activate("swiglu", jnp.ones_like(x), x).sum())(x.astype(dtype))

    np.testing.assert_allclose(slopes(jnp.float16), slopes(jnp.float32), atol=3e-3)
