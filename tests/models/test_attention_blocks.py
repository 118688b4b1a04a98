"""Attention by blocks equals the definition, forward and backward, for every block size and every kind of mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml.models.attention import Visible, query_block
from jaxml.models.attention_blocks import Shape, attend_blocks

B, T, N, K, H = 2, 12, 4, 2, 8
IDS = np.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * 12], np.int32)


def definition(q_BTNH, k_BTKH, v_BTKH, seen: Visible, cap: float | None):
    """Softmax attention as it is written down, over whole arrays."""
    k_BTNH, v_BTNH = (jnp.repeat(x, N // K, axis=2) for x in (k_BTKH, v_BTKH))
    scores_BNTS = jnp.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH) / np.sqrt(H)
    if cap is not None:
        scores_BNTS = cap * jnp.tanh(scores_BNTS / cap)
    scores_BNTS = jnp.where(seen.mask_BTS()[:, None], scores_BNTS, -1e30)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores_BNTS, axis=-1), v_BTNH)


@pytest.mark.parametrize(
    ("is_causal", "window", "cap", "block"),
    [(True, None, None, 12), (True, None, None, 5), (True, 3, 2.0, 4), (False, None, None, 5), (False, 3, 1.5, 4)],
)
def test_values_and_gradients_are_those_of_the_definition(is_causal, window, cap, block) -> None:
    with jax.enable_x64(True):
        draw = np.random.default_rng(0)
        sizes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
        q, k, v, weights = (jnp.asarray(draw.normal(size=size)) for size in sizes)
        seen, ids = Visible(jnp.asarray(IDS), is_causal, window), jnp.asarray(IDS)
        shape = Shape(is_causal, window, cap, block)

        def both(attention):
            return jax.value_and_grad(lambda *x: jnp.vdot(attention(*x), weights), argnums=(0, 1, 2))(q, k, v)

        value, grads = jax.jit(lambda: both(lambda q, k, v: attend_blocks(q, k, v, ids, shape)))()
        expected, expected_grads = jax.jit(lambda: both(lambda q, k, v: definition(q, k, v, seen, cap)))()
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        for grad, wanted in zip(grads, expected_grads, strict=True):
            np.testing.assert_allclose(grad, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())


def test_short_rows_and_accelerators_take_all_queries_at_once() -> None:
    assert query_block(64, "cpu") == 64
    assert query_block(256, "cpu") == 64
    assert query_block(4096, "cpu") == 256
    assert query_block(4096, "gpu") == 4096
