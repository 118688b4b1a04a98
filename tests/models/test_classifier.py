"""Pooling against NumPy, and what a classifier must not look at."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml import trees
from jaxml.models.classifier import pool
from jaxml.models.spec import ClassifierSpec
from tests.models import tiny


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_pooling_takes_valid_tokens_only_and_an_empty_row_is_zero(pooling):
    features = np.random.default_rng(0).normal(size=(4, 8, 3)).astype(np.float32)
    got = pool(jnp.asarray(features), jnp.asarray(tiny.SEGMENTS), pooling)
    for row, (x, segments) in enumerate(zip(features, tiny.SEGMENTS, strict=True)):
        valid = x[segments != 0]
        expected = np.zeros(3) if not len(valid) else valid.mean(0) if pooling == "mean" else valid[-1]
        np.testing.assert_allclose(got[row], expected, rtol=0, atol=1e-6)


def test_class_logits_are_float32_ignore_padding_and_reach_every_leaf():
    spec = ClassifierSpec(tiny.SPECS["encoder"], num_classes=3)
    model = tiny.bind(spec, "float32")
    params = tiny.lively_params(model)
    assert "decoder.head.kernel" not in trees.flatten(params)

    @jax.jit
    def run(params, tokens):
        def value(params):
            logits, aux = model.bind(params)(tokens, jnp.asarray(tiny.POSITIONS), jnp.asarray(tiny.SEGMENTS))
            assert aux == {}
            return jnp.sum(logits * jnp.arange(12.0).reshape(4, 3)), logits

        return jax.grad(value, has_aux=True)(params)

    gradients, logits = run(params, tiny.TOKENS)
    _, other = run(params, np.where(tiny.SEGMENTS == 0, 5, tiny.TOKENS))
    assert (logits.shape, logits.dtype) == ((4, 3), jnp.float32)
    np.testing.assert_array_equal(logits, other)
    np.testing.assert_array_equal(logits[3], params["head"]["bias"])
    assert [path for path, leaf in trees.flatten(gradients).items() if not np.any(leaf)] == []
