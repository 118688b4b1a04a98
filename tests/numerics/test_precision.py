"""Dtypes of a precision spec."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxml.errors import ConfigError
from jaxml.numerics.precision import cast_floating, dtypes
from jaxml.numerics.spec import PrecisionSpec


@pytest.mark.parametrize(
    ("compute", "accumulate"), [("float32", "float32"), ("bfloat16", "float32"), ("float64", "float64")]
)
def test_reductions_are_in_at_least_float32(compute, accumulate):
    with jax.enable_x64(True):
        policy = dtypes(PrecisionSpec(compute=compute))
    assert (policy.params, policy.compute, policy.accumulate) == ("float32", compute, accumulate)


@pytest.mark.parametrize("spec", [PrecisionSpec(params="float64"), PrecisionSpec(compute="float64")])
def test_float64_without_x64_is_refused_instead_of_silently_narrowed(spec):
    with pytest.raises(ConfigError, match="jax_enable_x64"):
        dtypes(spec)


def test_casting_leaves_integers_and_keys_alone():
    tree = {"w": jnp.ones(2), "n": jnp.arange(2), "k": jax.random.key(0)}
    cast = cast_floating(tree, jnp.bfloat16)
    assert cast["w"].dtype == jnp.bfloat16
    assert cast["n"] is tree["n"]
    assert cast["k"] is tree["k"]
