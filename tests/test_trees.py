"""Names, counts and comparisons of pytree leaves."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml import trees

names = st.text(st.characters(exclude_characters=".", exclude_categories=("Cs",)), min_size=1, max_size=3)
nested = st.recursive(st.integers(), lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3), max_leaves=8)


class Moments(NamedTuple):
    mu: dict
    count: int


@given(st.dictionaries(names, nested, max_size=3))
def test_unflatten_inverts_flatten_and_the_order_is_that_of_jax(tree):
    flat = trees.flatten(tree)
    assert trees.unflatten(flat) == tree
    assert list(flat.values()) == jax.tree.leaves(tree)


def test_paths_name_dict_keys_fields_and_indices():
    assert list(trees.flatten((Moments({"blocks": {"0": 1}}, 2), [3]))) == ["0.mu.blocks.0", "0.count", "1.0"]


def test_two_leaves_with_one_name_are_refused():
    with pytest.raises(ValueError, match="dot"):
        trees.flatten({"a.b": 1, "a": {"b": 2}})


def test_counts_work_on_abstract_leaves_and_keys():
    tree = {"w": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16), "n": np.zeros((), np.int32), "k": jax.random.key(0)}
    assert trees.num_parameters(tree) == 14
    assert trees.num_bytes(tree) == 24 + 4 + 8


def test_compare_is_silent_on_equal_bits_and_names_every_other_leaf():
    base = {"a": np.array([1.0, np.nan]), "b": jnp.zeros(3, jnp.bfloat16), "key": jax.random.key(1)}
    assert trees.compare(base, dict(base)) == []
    other = {"a": np.array([1.5, np.nan]), "b": jnp.zeros(2, jnp.bfloat16), "c": 1, "key": jax.random.key(2)}
    found = {difference.path: difference for difference in trees.compare(base, other)}
    assert list(found) == ["a", "b", "key", "c"]
    assert found["b"].expected == "bfloat16[3]"
    assert found["b"].got == "bfloat16[2]"
    assert found["b"].max_abs_difference is None
    assert found["c"].expected == "(absent)"
    assert found["key"].max_abs_difference == 1.0


def test_compare_sees_the_sign_of_zero_and_measures_differences():
    (zero,) = trees.compare({"x": np.float32([0.0])}, {"x": np.float32([-0.0])})
    assert zero.max_abs_difference == 0.0
    (wrong,) = trees.compare({"x": jnp.array([1, 2])}, {"x": jnp.array([1, 5])})
    assert wrong.max_abs_difference == 3.0
    assert "x" in str(wrong)


def test_the_first_leaf_that_is_not_finite_is_named():
    tree = {
        "a": {"n": np.arange(3), "x": jnp.ones(2, jnp.bfloat16)},
        "b": np.array([0.0, np.inf]),
        "c": np.array(np.nan),
    }
    assert trees.first_nonfinite(tree) == "b"
    assert trees.first_nonfinite(tree["a"]) is None
    assert trees.first_nonfinite({"y": jnp.array([jnp.nan], jnp.bfloat16)}) == "y"
