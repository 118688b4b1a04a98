"""The loss scale over any history of good steps, overflows and losses that were not finite."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxml.numerics.loss_scale import initial_loss_scale, next_loss_scale
from jaxml.numerics.spec import LossScaleSpec

SPEC = LossScaleSpec(initial=2.0**5, growth_interval=3, smallest=2.0, largest=2.0**7)
OUTCOMES = st.lists(st.sampled_from(["good", "overflow", "no loss"]), max_size=40)


def after(outcomes: list[str]) -> dict[str, Any]:
    """The loss scale after these steps, as numbers."""
    scale = initial_loss_scale(SPEC)
    for outcome in outcomes:
        scale = jitted()(scale, np.bool_(outcome == "good"), np.bool_(outcome == "overflow"))
    return {name: value.item() for name, value in jax.device_get(scale).items()}


@cache
def jitted():
    return jax.jit(lambda scale, is_applied, is_overflow: next_loss_scale(SPEC, scale, is_applied, is_overflow))


@given(OUTCOMES)
def test_the_scale_is_a_power_of_two_within_its_limits_and_every_overflow_is_counted(outcomes):
    end = after(outcomes)
    assert SPEC.smallest <= end["scale"] <= SPEC.largest
    assert math.frexp(end["scale"])[0] == 0.5
    assert end["skipped"] == outcomes.count("overflow")


@given(OUTCOMES)
def test_a_step_without_a_loss_says_nothing_about_the_scale(outcomes):
    assert after(outcomes) == after([outcome for outcome in outcomes if outcome != "no loss"])


@given(OUTCOMES)
def test_an_overflow_halves_the_scale_and_starts_the_count_of_good_steps_again(outcomes):
    before, end = after(outcomes), after([*outcomes, "overflow"])
    assert end["scale"] == max(before["scale"] / 2, SPEC.smallest)
    assert end["good_steps"] == 0
    assert end["skipped_in_a_row"] == before["skipped_in_a_row"] + 1
    assert after([*outcomes, "overflow", "good"])["skipped_in_a_row"] == 0


def test_the_scale_doubles_after_the_interval_and_not_before():
    scales = [after(["good"] * count)["scale"] for count in range(10)]
    assert scales == [32.0] * 3 + [64.0] * 3 + [128.0] * 4


def test_the_scale_stays_float32_and_the_counts_int32():
    scale = next_loss_scale(SPEC, initial_loss_scale(SPEC), jnp.array(True), jnp.array(False))
    assert {name: value.dtype.name for name, value in scale.items()} == {
        "scale": "float32",
        "good_steps": "int32",
        "skipped": "int32",
        "skipped_in_a_row": "int32",
    }
