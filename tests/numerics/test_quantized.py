"""int8 weights and their products: how far rounding moves them, what it keeps, and what it does with odd values."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxml.numerics.quantized import dequantize, int8_product, quantize_weights, weight_only_product

qwix = pytest.importorskip("qwix")
PRODUCTS = {"int8": (int8_product, 127), "int8-weights": (weight_only_product, 32639)}
quantize = jax.jit(quantize_weights)


def uneven(*shape: int, seed: int = 0) -> np.ndarray:
    """Random rows whose sizes differ a thousandfold."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-2, 1, (*shape[:-1], 1))).astype(np.float32)


@hypothesis.given(
    arrays.arrays(np.float32, (3, 2, 5), elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False))
)
@hypothesis.settings(max_examples=50)
def test_each_weight_is_off_by_at_most_half_the_scale_of_its_channel(weights):
    values, scales = map(np.asarray, quantize(weights))
    wide = weights.astype(np.float64)
    largest = np.abs(wide).max(-1)
    assert (np.abs(values * scales[..., None].astype(np.float64) - wide) <= 0.500001 * scales[..., None]).all()
    is_usual = largest > 1e-30
    assert (scales[is_usual] <= largest[is_usual] / 127 * (1 + 2**-7)).all()
    assert not values[largest == 0].any() and (scales[largest == 0] == 1).all()
    assert np.abs(values).max() <= 127


def test_constant_rows_and_their_signs_are_kept_and_an_outlier_rounds_only_its_own_row():
    weights = np.array([[0.3] * 4, [-7.0] * 4, [0.01, -0.02, 0.03, 0.04], [0.01, -0.02, 0.03, 50.0]], np.float32)
    values, scales = quantize(weights)
    back = np.asarray(dequantize(values, scales))
    np.testing.assert_allclose(back[:2], weights[:2], rtol=2**-7)
    np.testing.assert_allclose(back[2], weights[2], atol=0.51 * 0.04 / 127)
    assert back[3].tolist() == pytest.approx([0, 0, 0, 50.0], rel=2**-7)


def test_the_scales_are_the_same_ones_in_bfloat16():
    scales = np.asarray(quantize(uneven(64, 16))[1])
    np.testing.assert_array_equal(scales.astype(ml_dtypes.bfloat16).astype(np.float32), scales)


@pytest.mark.parametrize("scheme", PRODUCTS)
def test_a_product_is_that_of_the_dequantized_weights_within_the_rounding_of_the_row(scheme):
    """By entry: no rounding of x moves a sum by more than half a step times the magnitudes of the weights."""
    product, steps = PRODUCTS[scheme]
    x, (values, scales) = uneven(2, 3, 40), quantize(uneven(24, 40, seed=1))
    got = np.asarray(jax.jit(product)(x, values, scales), np.float64)
    back = np.asarray(dequantize(values, scales), np.float64)
    step = np.abs(x).max(-1, keepdims=True) / steps
    bound = 0.5001 * step * np.abs(back).sum(-1) + 1e-6 * (np.abs(x) @ np.abs(back).T)
    errors = np.abs(got - x.astype(np.float64) @ back.T)
    assert (errors <= bound).all()
    assert errors.max() > 0


@pytest.mark.parametrize("scheme", PRODUCTS)
def test_a_row_has_the_same_bits_alone_and_among_others(scheme):
    product = jax.jit(PRODUCTS[scheme][0])
    x, (values, scales) = uneven(5, 40), quantize(uneven(24, 40, seed=1))
    together = np.asarray(product(x, values, scales))
    for row in range(5):
        assert together[row].tobytes() == np.asarray(product(x[row : row + 1], values, scales))[0].tobytes()
    assert together[::-1].tobytes() == np.asarray(product(x[::-1].copy(), values, scales)).tobytes()


@pytest.mark.parametrize("scheme", PRODUCTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_zero_rows_give_zero_and_a_row_that_is_not_finite_harms_no_other(scheme, bad):
    product = jax.jit(PRODUCTS[scheme][0])
    x, (values, scales) = uneven(4, 8), quantize(uneven(3, 8, seed=1))
    expected = np.asarray(product(x, values, scales))
    x[1], x[2, 3] = 0.0, bad
    got = np.asarray(product(x, values, scales))
    assert not got[1].any() and not np.isfinite(got[2]).any()
    np.testing.assert_array_equal(got[[0, 3]], expected[[0, 3]])


@pytest.mark.parametrize("scheme", PRODUCTS)
def test_a_row_in_bfloat16_is_multiplied_as_the_same_numbers_in_float32(scheme):
    product = jax.jit(PRODUCTS[scheme][0])
    x, (values, scales) = uneven(3, 8).astype(ml_dtypes.bfloat16), quantize(uneven(5, 8, seed=1))
    got = np.asarray(product(x, values, scales.astype(ml_dtypes.bfloat16)))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, product(x.astype(np.float32), values, scales))


def test_the_form_of_accelerators_multiplies_unrounded_rows():
    from jaxml.numerics.quantized import _widened_product

    x, (values, scales) = uneven(3, 8), quantize(uneven(5, 8, seed=1))
    for dtype, bound in ((np.float32, 1e-6), (ml_dtypes.bfloat16, 1e-5)):
        given, used = x.astype(dtype), jnp.asarray(scales, dtype)
        expected = given.astype(np.float64) @ np.asarray(dequantize(values, scales), np.float64).T
        got = np.asarray(jax.jit(_widened_product)(given, values, used))
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=0, atol=bound * np.abs(expected).max())


def test_qwix_multiplies_the_same_arrays_to_the_same_result():
    x, (values, scales) = uneven(6, 40), quantize(uneven(24, 40, seed=1))
    steps = np.abs(x).max(-1, keepdims=True) / np.float32(127)  # Qwix itself divides by 127.5
    x8: Any = qwix.QArray(jnp.asarray(np.round(x / steps), jnp.int8), jnp.asarray(steps))
    weights8 = qwix.QArray(values.T, scales[None, :])
    expected = qwix.dot_general(x8, weights8, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    got = jax.jit(int8_product)(x, values, scales)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
