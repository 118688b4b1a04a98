"""Extending a cache is the same as one pass over the whole row, in float64, for every causal kind of decoder."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml import trees
from jaxml.models.cache import empty_cache
from jaxml.models.unrolled import unrolled_params, unrolled_spec
from tests.models import tiny

PARITY = 1e-10  # of the largest magnitude: the bound
CAUSAL = ("llama", "gpt2", "gemma")
LENGTHS = np.array([8, 5], np.int32)
TOKENS = tiny.TOKENS[:2]
CAPACITY = 11  # not the length of the rows, so that slots nobody wrote are there to be seen


@cache
def bound(name: str, is_unrolled: bool) -> Any:
    spec = tiny.SPECS[name]
    with jax.enable_x64(True):
        return tiny.bind(unrolled_spec(spec) if is_unrolled else spec, "float64")


@cache
def extend(name: str, is_unrolled: bool) -> Any:
    return jax.jit(lambda params, *inputs: bound(name, is_unrolled).bind(params).extend(*inputs))


@cache
def whole(name: str) -> np.ndarray:
    """Features of one pass over the full rows."""
    model = bound(name, False)
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), TOKENS.shape)
    with jax.enable_x64(True):
        run = jax.jit(lambda params, *inputs: model.bind(params)(*inputs)[0])
        return np.asarray(run(tiny.lively_params(model), TOKENS, positions, np.ones_like(TOKENS)))


def params_of(name: str, is_unrolled: bool) -> Any:
    params = tiny.lively_params(bound(name, False))
    return unrolled_params(tiny.SPECS[name], params) if is_unrolled else params


def assert_goes_on(name: str, run: Any, cached: Any) -> None:
    """Three tokens more of rows that have 4 and 2 in the cache."""
    places = np.array([4, 2], np.int32)
    for _ in range(3):
        tokens = TOKENS[[0, 1], places][:, None]
        features, cached = run(tokens, places, cached)
        assert_close(np.asarray(features)[:, 0], whole(name)[[0, 1], places])
        places = places + 1


def assert_close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=PARITY * np.abs(expected).max())


@pytest.mark.parametrize("is_unrolled", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_pieces_through_a_cache_equal_one_pass(name, is_unrolled):
    with jax.enable_x64(True):
        params, run = params_of(name, is_unrolled), extend(name, is_unrolled)
        cached = empty_cache(tiny.SPECS[name], 2, CAPACITY, jnp.float64)
        found = []
        for start in (0, 4):  # one compile: two pieces of four tokens
            features, cached = run(params, TOKENS[:, start : start + 4], np.int32(start), cached)
            found.append(np.asarray(features))
    assert_close(np.concatenate(found, axis=1), whole(name))


@pytest.mark.parametrize("name", CAUSAL)
def test_rows_that_end_apart_are_decoded_as_if_alone(name):
    """Row 0 has 4 tokens in the cache and row 1 has 2 (and rubbish after them); then each goes on at its own place."""
    with jax.enable_x64(True):
        params, run = params_of(name, True), extend(name, True)
        cached = empty_cache(tiny.SPECS[name], 2, CAPACITY, jnp.float64)
        begun = TOKENS[:, :4].copy()
        begun[1, 2:] = 31
        _, cached = run(params, begun, np.int32(0), cached)
        assert_goes_on(name, partial(run, params), cached)


def test_in_float32_the_difference_is_rounding():
    """1e-5 of the largest logit, one token at a time."""
    spec = tiny.SPECS["llama"]
    model, unrolled = tiny.bind(spec), tiny.bind(unrolled_spec(spec))
    params = tiny.lively_params(model)
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), TOKENS.shape)

    def logits_of(bound, params, run, *inputs):
        module = bound.bind(params)
        features, rest = getattr(module, run)(*inputs)
        return module.logits(features), rest

    whole = jax.jit(partial(logits_of, model), static_argnums=1)
    expected, _ = whole(params, "__call__", TOKENS, positions, np.ones_like(TOKENS))
    step = jax.jit(partial(logits_of, unrolled), static_argnums=1)
    cached, unrolled_leaves = empty_cache(spec, 2, CAPACITY, jnp.float32), unrolled_params(spec, params)
    for place in range(8):
        got, cached = step(unrolled_leaves, "extend", TOKENS[:, place : place + 1], np.int32(place), cached)
        bound = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(got[:, 0], np.asarray(expected)[:, place], rtol=0, atol=bound)


def test_unrolling_gives_every_layer_a_leaf_of_its_own_and_loses_none():
    spec = tiny.SPECS["gemma"]
    model, unrolled = tiny.bind(spec), tiny.bind(unrolled_spec(spec))
    params = unrolled_params(spec, tiny.lively_params(model))
    shapes = partial(jax.tree.map, lambda leaf: (leaf.shape, leaf.dtype))
    assert trees.flatten(shapes(params)) == trees.flatten(shapes(unrolled.abstract_params))
    assert trees.num_parameters(params) == trees.num_parameters(model.abstract_params)
