"""Laws of the decoder, and its numbers against the NumPy reference. Parity is in float64, so that 1e-9 means a bug."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml import trees
from jaxml.errors import ConfigError
from jaxml.models.build import BoundModel
from tests.models import tiny
from tests.reference import decoder as reference

PARITY = 1e-9  # of the largest magnitude
DIFFERENTIATED = ("llama", "gemma")


@cache
def bound(name: str, **execution: Any) -> BoundModel:
    with jax.enable_x64(True):
        return tiny.bind(tiny.SPECS[name], "float64", **execution)


@cache
def program(name: str, **execution: Any) -> Any:
    """(features, logits, gradients of a fixed function of them or None), one compile for each model and execution."""
    model = bound(name, **execution)

    @jax.jit
    def run(params: Any, tokens: Any, positions: Any, segments: Any, dropout_keys: Any = None) -> Any:
        def value(params: Any) -> Any:
            decoder = model.bind(params)
            features, aux = decoder(tokens, positions, segments, dropout_keys)
            assert aux == {}
            logits = decoder.logits(features)
            weights = jnp.sin(jnp.arange(logits.size)).reshape(logits.shape)
            return jnp.sum(weights * logits), (features, logits)

        if name not in DIFFERENTIATED:
            return *value(params)[1], None
        gradients, (features, logits) = jax.grad(value, has_aux=True)(params)
        return features, logits, gradients

    return run


def run(
    name: str,
    tokens: np.ndarray = tiny.TOKENS,
    positions: np.ndarray = tiny.POSITIONS,
    segments: np.ndarray = tiny.SEGMENTS,
    dropout_keys: Any = None,
    **execution: Any,
) -> Any:
    """The program on lively parameters; NumPy in, NumPy out."""
    with jax.enable_x64(True):
        params = tiny.lively_params(bound(name))
        return jax.device_get(program(name, **execution)(params, tokens, positions, segments, dropout_keys))


def assert_close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=PARITY * np.abs(expected).max())


@pytest.mark.parametrize("name", tiny.SPECS)
def test_features_and_logits_equal_the_numpy_reference(name):
    spec = tiny.SPECS[name]
    features, logits, _ = run(name)
    with jax.enable_x64(True):
        params = jax.device_get(tiny.lively_params(bound(name)))
    expected = reference.features(spec, params, tiny.TOKENS, tiny.POSITIONS, tiny.SEGMENTS)
    assert_close(features, expected)
    assert_close(logits, reference.logits(spec, params, expected))


def test_scanned_and_rematerialised_execution_gives_the_same_tree_values_and_gradients():
    execution = {"layers": "scanned", "rematerialize": "full"}
    plain, scanned = run("gemma"), run("gemma", **execution)
    assert trees.flatten(bound("gemma").abstract_params) == trees.flatten(bound("gemma", **execution).abstract_params)
    for expected, got in zip(jax.tree.leaves(plain), jax.tree.leaves(scanned), strict=True):
        assert_close(got, expected)


def test_the_features_of_a_prefix_do_not_change_with_later_tokens():
    later = tiny.TOKENS.copy()
    later[:, 5:] = (later[:, 5:] + 1) % 32
    before, after = run("llama")[0], run("llama", later)[0]
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.array_equal(before[2, 5:], after[2, 5:])
    assert not np.array_equal(run("encoder")[0][2, :5], run("encoder", later)[0][2, :5])


@pytest.mark.parametrize("name", tiny.SPECS)
def test_packed_documents_equal_the_documents_run_alone(name):
    packed = run(name)[0][0]
    tokens, positions, segments = (np.zeros((4, 8), np.int32) for _ in range(3))
    for row, document in enumerate([slice(0, 3), slice(3, 7)]):
        length = document.stop - document.start
        tokens[row, :length] = tiny.TOKENS[0, document]
        positions[row, :length], segments[row, :length] = range(length), 1
    alone = run(name, tokens, positions, segments)[0]
    assert_close(packed[:3], alone[0, :3])
    assert_close(packed[3:7], alone[1, :4])


@pytest.mark.parametrize("name", tiny.SPECS)
def test_padding_is_zero_and_touches_neither_features_nor_gradients(name):
    features, _, gradients = run(name)
    assert not features[tiny.SEGMENTS == 0].any()
    assert (gradients is None) == (name not in DIFFERENTIATED)
    assert trees.first_nonfinite(gradients) is None
    other_padding = np.where(tiny.SEGMENTS == 0, (tiny.TOKENS + 7) % 32, tiny.TOKENS)
    assert trees.compare((features, gradients), run(name, other_padding)[::2]) == []


@cache
def dropping(layers: str) -> Any:
    """Features of chosen rows of the shared batch, with dropout 0.5 drawn from the keys given."""
    with jax.enable_x64(True):
        spec = tiny.decoder(*tiny.SPECS["llama"].blocks, tiny.PLAIN, num_layers=4, dropout=0.5)
        model = tiny.bind(spec, "float64", layers=layers)
        params = tiny.lively_params(model)

    @jax.jit
    def features(rows: Any, keys: Any) -> Any:
        batch = (jnp.asarray(x)[rows] for x in (tiny.TOKENS, tiny.POSITIONS, tiny.SEGMENTS))
        return model.bind(params)(*batch, keys)[0]

    return features


def test_dropout_follows_the_row_and_neither_its_place_nor_the_batch_split_nor_the_execution():
    keys, order, some = tiny.dropout_keys(4), np.array([2, 0, 3, 1]), np.array([2, 1])
    with jax.enable_x64(True):
        whole = dropping("unrolled")(np.arange(4), keys)
        assert_close(dropping("unrolled")(order, keys[order]), whole[order])
        assert_close(dropping("unrolled")(some, keys[some]), whole[some])
        assert_close(dropping("scanned")(np.arange(4), keys), whole)
        assert not np.allclose(dropping("unrolled")(np.arange(4), tiny.dropout_keys(4, step=1)), whole)


def test_bfloat16_compute_keeps_norms_softmax_and_logits_in_float32():
    model = tiny.bind(tiny.SPECS["gpt2"], "float32", "bfloat16")  # its activation has no exp of its own
    params = tiny.lively_params(model)

    def outputs(params: Any) -> Any:
        decoder = model.bind(params)
        features, _ = decoder(*(jnp.asarray(x) for x in (tiny.TOKENS, tiny.POSITIONS, tiny.SEGMENTS)))
        return features, decoder.logits(features)

    features, logits = jax.eval_shape(outputs, params)
    assert (features.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    text = str(jax.make_jaxpr(outputs)(params))
    for operation in (" exp ", " rsqrt ", " reduce_sum["):
        lines = [line for line in text.splitlines() if operation in line]
        assert lines
        assert all(":bf16" not in line.split("=")[0] for line in lines), lines


def test_a_row_longer_than_the_context_is_refused():
    model = tiny.bind(tiny.SPECS["llama"])
    tokens = jnp.zeros((1, 9), jnp.int32)
    with pytest.raises(ConfigError, match="context_length, 8"):
        jax.eval_shape(lambda p: model.bind(p)(tokens, tokens, tokens)[0], model.abstract_params)
