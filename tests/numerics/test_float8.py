"""The float8 product: what its operands are, how far it is from the exact one, and what it does with odd values."""

from __future__ import annotations

import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxml.errors import MissingExtraError
from jaxml.numerics.float8 import float8_product

# Half a unit in the last place, relative: 3 mantissa bits in e4m3, 2 in e5m2.
HALF_E4M3, HALF_E5M2 = 2.0**-4, 2.0**-3


def operands(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [3, 5, 32] whose rows differ a thousandfold in size, W [32, 16] whose columns do, weights [3, 5, 16] of x W."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 5, 32)) * 10.0 ** rng.uniform(-2, 1, (3, 5, 1))
    kernel = rng.standard_normal((32, 16)) * 10.0 ** rng.uniform(-2, 1, (1, 16))
    weights = rng.standard_normal((3, 5, 16))
    return tuple(array.astype(dtype) for array in (x, kernel, weights))  # type: ignore[return-value]


@partial(jax.jit, static_argnums=0)
def value_and_gradients(product, x: jax.Array, kernel: jax.Array, weights: jax.Array):
    """x W, and the gradients of its weighted sum for x and for W."""
    value, gradients_of = jax.vjp(product, x, kernel)
    return value, *gradients_of(weights)


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16])
def test_values_and_gradients_are_within_the_rounding_of_their_formats(dtype):
    """By entry: no rounding moves a sum by more than its share of the sum of magnitudes, for rows of any size."""
    given = operands(dtype)
    wide = [array.astype(np.float32) for array in given]
    exact = value_and_gradients(jnp.matmul, *wide)
    sizes = value_and_gradients(jnp.matmul, *map(np.abs, wide))
    # Two roundings to each product, their own product, and what float32 or bfloat16 round beside them.
    forward, backward = 2.2 * HALF_E4M3, 1.1 * (HALF_E4M3 + HALF_E5M2)
    for got, right, size, share in zip(
        value_and_gradients(float8_product, *given), exact, sizes, (forward, backward, backward), strict=True
    ):
        assert got.dtype == dtype
        assert (np.abs(np.asarray(got, np.float32) - right) <= share * np.asarray(size)).all()


def test_values_that_float8_holds_are_multiplied_exactly():
    rng = np.random.default_rng(2)
    x, kernel = (rng.choice(np.float32([-448, -2, 0, 1, 448]), shape) for shape in ((4, 8), (8, 6)))
    # A row whose largest magnitude is 448 has the scale 1.
    x[:, 0], kernel[0, :] = 448, 448
    np.testing.assert_array_equal(jax.jit(float8_product)(x, kernel), x @ kernel)


def test_rows_keep_to_themselves_zeros_stay_zeros_and_what_is_not_finite_stays_so():
    x, kernel, weights = operands()
    plain = np.asarray(value_and_gradients(float8_product, x, kernel, weights)[0])
    x[0, 0], x[0, 1, 2], x[0, 2, 3] = 0, np.nan, np.inf
    y = np.asarray(value_and_gradients(float8_product, x, kernel, weights)[0])
    assert (y[0, 0] == 0).all()
    assert not np.isfinite(y[0, 1:3]).any()
    np.testing.assert_array_equal(y[0, 3:], plain[0, 3:])
    np.testing.assert_array_equal(y[1:], plain[1:])


def test_the_program_multiplies_float8_and_casts_nothing_back_before():
    text = value_and_gradients.lower(float8_product, *operands()).as_text()
    products = re.findall(r"stablehlo\.dot_general .*: \(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\)", text)
    assert products == [("f8E4M3FN", "f8E4M3FN"), ("f8E5M2", "f8E4M3FN"), ("f8E4M3FN", "f8E5M2")]


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'jaxml[float8]'")):
        jax.eval_shape(float8_product, *operands()[:2])
