"""Dtypes of a precision spec, by backend; and the casts."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxml.config.spec import from_json, to_json
from jaxml.errors import ConfigError
from jaxml.numerics.precision import cast_floating, describe, dtypes
from jaxml.numerics.spec import LossScaleSpec, PrecisionSpec, resolved


@pytest.mark.parametrize(
    ("compute", "accumulate"),
    [("float32", "float32"), ("bfloat16", "float32"), ("float16", "float32"), ("float64", "float64")],
)
def test_reductions_and_results_are_in_at_least_float32(compute, accumulate):
    with jax.enable_x64(True):
        policy = dtypes(PrecisionSpec(compute=compute))
    assert (policy.params, policy.compute) == ("float32", compute)
    assert policy.accumulate == policy.output == accumulate


@pytest.mark.parametrize(("backend", "fast"), [("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")])
def test_the_default_is_the_fast_dtype_of_the_backend_and_is_recorded_by_its_name(backend, fast):
    assert dtypes(PrecisionSpec(), backend).compute == fast
    assert resolved(PrecisionSpec(), backend) == PrecisionSpec(compute=fast)


@pytest.mark.parametrize(("backend", "around"), [("cpu", "float32"), ("gpu", "bfloat16")])
def test_around_float8_products_everything_is_in_the_fast_dtype(backend, around):
    policy = dtypes(PrecisionSpec(compute="float8"), backend)
    assert policy.is_float8
    assert policy.compute == around
    assert resolved(PrecisionSpec(compute="float8"), backend).compute == "float8"


def test_a_proof_in_float64_has_no_quantiser_and_no_loss_scale():
    with jax.enable_x64(True):
        policy = dtypes(replace(PrecisionSpec(compute="float8"), params="float64", compute="float64"))
    assert {*policy[:4]} == {jnp.dtype("float64")}
    assert (policy.is_float8, policy.loss_scale) == (False, None)


def test_only_float16_has_a_loss_scale():
    with jax.enable_x64(True):
        scales = {
            compute: dtypes(PrecisionSpec(compute=compute)).loss_scale
            for compute in ("auto", "float32", "float64", "bfloat16", "float16", "float8")
        }
    assert {compute for compute, scale in scales.items() if scale is not None} == {"float16"}


@pytest.mark.parametrize("spec", [PrecisionSpec(params="float64"), PrecisionSpec(compute="float64")])
def test_float64_without_x64_is_refused_instead_of_silently_narrowed(spec):
    with pytest.raises(ConfigError, match="jax_enable_x64"):
        dtypes(spec)


@pytest.mark.parametrize(
    "scale",
    [
        LossScaleSpec(initial=0.5),
        LossScaleSpec(initial=2.0**25),
        LossScaleSpec(smallest=0.0),
        LossScaleSpec(growth_interval=0),
    ],
)
def test_a_loss_scale_that_cannot_be_right_is_refused_and_ignored_where_it_is_not_used(scale):
    with pytest.raises(ConfigError, match="loss_scale"):
        dtypes(PrecisionSpec(compute="float16", loss_scale=scale))
    assert dtypes(PrecisionSpec(compute="bfloat16", loss_scale=scale)).loss_scale is None


def test_a_record_of_before_the_loss_scale_still_opens():
    old = {name: value for name, value in to_json(PrecisionSpec(compute="float32")).items() if name != "loss_scale"}
    assert from_json(old) == PrecisionSpec(compute="float32")


def test_a_person_is_told_every_dtype():
    assert describe(dtypes(PrecisionSpec(compute="float8"), "gpu")) == (
        "params float32, compute bfloat16 (float8 products), accumulate float32, output float32"
    )


def test_casting_leaves_integers_and_keys_alone():
    tree = {"w": jnp.ones(2), "n": jnp.arange(2), "k": jax.random.key(0)}
    cast = cast_floating(tree, jnp.bfloat16)
    assert cast["w"].dtype == jnp.bfloat16
    assert cast["n"] is tree["n"]
    assert cast["k"] is tree["k"]
