"""Spikes by robust deviations; and the leaf, the loss term and the records behind a step that was not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.train.guard import SpikeDetector, bad_rows, diagnose
from jaxml.train.spec import GuardSpec
from jaxml.train.step import to_host
from tests.train import tiny

SPEC = GuardSpec(spike_threshold=6.0, spike_window=10)
LOSSES = st.lists(st.floats(0.5, 5.0), min_size=0, max_size=40)


def test_deviations_are_those_of_median_and_mad():
    past = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert SpikeDetector(SPEC, past).deviations(12.5) == pytest.approx((12.5 - 5.5) / (1.4826 * 2.5))


def test_a_spike_is_found_and_stays_out_of_the_window():
    detector = SpikeDetector(SPEC, [2.0, 2.1, 1.9, 2.05, 1.95] * 2)
    assert not detector.observe(2.2)
    before = detector.deviations(3.0)
    assert [detector.observe(loss) for loss in (9.0, 9.1, 9.2)] == [True] * 3
    assert detector.deviations(3.0) == before


def test_falling_and_constant_losses_and_small_wobbles_are_no_spikes():
    assert not any(map(SpikeDetector(SPEC).observe, np.linspace(5, 1, 100)))
    constant = SpikeDetector(SPEC, [2.0] * 10)
    assert not constant.observe(2.005)
    assert constant.observe(2.5)


def test_one_outlier_in_the_window_does_not_raise_the_bar():
    clean, outlier = [2.0, 2.1, 1.9, 2.05, 1.95] * 2, [2.0, 2.1, 1.9, 2.05, 1.95] * 2
    outlier[3] = 100.0
    assert SpikeDetector(SPEC, outlier).deviations(4.0) > 0.5 * SpikeDetector(SPEC, clean).deviations(4.0) > 6.0


@given(LOSSES, LOSSES)
def test_a_detector_rebuilt_from_the_log_decides_as_the_one_that_lived_on(past, coming):
    lived = SpikeDetector(SPEC)
    for loss in past:
        lived.observe(loss)
    rebuilt = SpikeDetector(SPEC, past)
    assert [lived.observe(loss) for loss in coming] == [rebuilt.observe(loss) for loss in coming]


@given(st.lists(st.floats(0.5, 5.0), min_size=9, max_size=9), st.floats(0, 1e6))
def test_nothing_is_a_spike_before_the_window_is_full_or_with_a_threshold_of_zero(past, loss):
    assert not SpikeDetector(SPEC, past).observe(loss)
    assert not SpikeDetector(GuardSpec(spike_threshold=0.0, spike_window=8), past).observe(loss)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_no_spike_and_is_not_remembered(loss):
    detector = SpikeDetector(SPEC, [2.0, 2.1] * 5)
    before = detector.deviations(3.0)
    assert not detector.observe(loss)
    assert detector.deviations(3.0) == before


@pytest.mark.usefixtures("float64")
def test_a_poisoned_token_is_traced_to_its_leaf_term_and_records():
    program, batch = tiny.program(), tiny.language_batch()
    state = tiny.state_of(program)
    table = state["params"]["embed"]["table"].at[tiny.RARE_TOKEN].set(jnp.nan)
    state["params"]["embed"]["table"] = jax.device_put(table, program.state_shardings["params"]["embed"]["table"])
    batch["loss_mask"][list(tiny.RARE_ROWS), 0] = True  # the poisoned token itself counts
    state, metrics = program.train_step(state, batch)
    diagnosis = diagnose(program, state["params"], batch, to_host(metrics))
    assert diagnosis.rows == tiny.RARE_ROWS
    assert diagnosis.records == ((1, 1005), (1, 1017))
    assert diagnosis.term == "loss"
    assert diagnosis.leaf == "blocks.0.attention.key.bias"
    assert "record 1005 of source 1" in str(diagnosis)
    assert "blocks.0.attention.key.bias" in str(diagnosis)


def test_a_row_whose_gradient_alone_is_not_finite_is_found():
    """sqrt has value 0 and slope infinity at 0; a loss that is not finite is named before any gradient is taken."""

    def row_losses(scale, batch):
        return jnp.sqrt(scale * batch["x"])

    assert bad_rows(row_losses, jnp.float32(1), {"x": jnp.array([1.0, 0.0, 2.0])}) == (1,)
    assert bad_rows(row_losses, jnp.float32(1), {"x": jnp.array([1.0, 0.0, -2.0])}) == (2,)
    assert bad_rows(row_losses, jnp.float32(1), {"x": jnp.array([1.0, 3.0, 2.0])}) == ()
