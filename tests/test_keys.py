"""Keys are pure functions of seed, purpose, step and row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxml import keys


def words(key):
    return np.asarray(jax.random.key_data(key)).reshape(-1, 2)


def test_seed_purpose_and_step_each_give_another_key():
    made = [keys.step_key(s, t, p) for s in (0, 1, 2**31) for t in (0, 1) for p in ("dropout", "shuffle")]
    assert len({tuple(words(key)[0]) for key in made}) == 12


def test_a_traced_step_gives_the_key_of_the_number():
    traced = jax.jit(lambda step: keys.step_key(3, step, "dropout"))(jnp.int32(7))
    np.testing.assert_array_equal(words(traced), words(keys.step_key(3, 7, "dropout")))


def test_a_row_key_depends_on_the_row_number_and_not_on_its_place():
    key = keys.step_key(0, 0, "dropout")
    whole = words(keys.row_keys(key, jnp.arange(6)))
    np.testing.assert_array_equal(words(keys.row_keys(key, jnp.array([5, 2]))), whole[[5, 2]])
    assert len(np.unique(whole, axis=0)) == 6


def test_the_numbers_are_those_of_the_first_release():
    """A changed key derivation changes every run: this value is written down, not computed."""
    assert words(keys.step_key(0, 0, "dropout")).tolist() == [[244916945, 3858068630]]


def test_seeds_beyond_32_bits_are_taken_modulo():
    np.testing.assert_array_equal(words(keys.root_key(2**32 + 5)), words(keys.root_key(5)))
