"""Masks belong to rows, sites and layers; the mean is kept."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxml.models.dropout import drop
from tests.models import tiny

X = jnp.ones((4, 64, 16), jnp.float32)


def test_no_keys_or_no_rate_is_the_identity():
    assert drop(X, None, 0.5, "mlp") is X
    assert drop(X, tiny.dropout_keys(4), 0.0, "mlp") is X


def test_masks_follow_the_row_key_bit_for_bit():
    keys, order = tiny.dropout_keys(4), np.array([3, 1, 0, 2])
    whole = drop(X, keys, 0.5, "attention", 2)
    np.testing.assert_array_equal(drop(X, keys[order], 0.5, "attention", 2), whole[order])
    np.testing.assert_array_equal(drop(X[:1], keys[2:3], 0.5, "attention", 2), whole[2:3])


def test_sites_layers_and_rows_draw_different_masks():
    keys = tiny.dropout_keys(4)
    draws = [drop(X, keys, 0.5, *where) for where in (("embedding",), ("attention",), ("mlp",), ("mlp", 1))]
    rows = np.concatenate(draws).reshape(16, -1)
    assert len(np.unique(rows, axis=0)) == 16


def test_the_kept_fraction_and_the_mean_are_right():
    dropped = np.asarray(drop(X, tiny.dropout_keys(4), 0.2, "mlp"))
    assert abs((dropped == 0).mean() - 0.2) < 0.03  # 4,096 draws
    assert abs(dropped.mean() - 1.0) < 0.04
    np.testing.assert_allclose(np.unique(dropped), [0.0, 1.25], rtol=1e-4)
