"""The few numbers of a run, against sums done by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.observe.summary import INPUT_BOUND_SHARE, summarize


def records(waits):
    """Steps of one second each, of which `waits` were spent waiting for data."""
    return [
        {"step": i, "tokens_per_s": 100.0, "step_s": 1.0 - wait, "data_wait_s": wait}
        for i, wait in enumerate(waits, start=1)
    ]


@given(st.lists(st.floats(0, 1), min_size=2))
def test_the_data_wait_share_is_the_waiting_part_of_the_step_time_without_the_first_step(waits):
    summary = summarize(records(waits), {})
    assert summary.data_wait_share == pytest.approx(sum(waits[1:]) / (len(waits) - 1))
    assert summary.is_input_bound == (summary.data_wait_share > INPUT_BOUND_SHARE)
    assert summary.verdict.startswith("input-bound" if summary.is_input_bound else "not input-bound")


def test_bursts_of_waiting_count():
    assert summarize(records([0.0] + [0, 0, 0, 1] * 5), {}).verdict.startswith("input-bound: 25.0%")


def test_one_slow_start_does_not_make_a_run_input_bound():
    assert not summarize(records([1.0, 0, 0, 0]), {}).is_input_bound


def test_throughput_is_the_median_over_steps():
    run = records([0] * 4)
    run[3]["tokens_per_s"] = 2.0
    assert summarize(run, {}).tokens_per_s == 100.0


def test_compile_and_wall_seconds_come_from_the_account():
    summary = summarize(records([0]), {"compile": 2.5, "step": 7.5})
    assert (summary.compile_s, summary.wall_s, summary.num_steps) == (2.5, 10.0, 1)


@pytest.mark.parametrize("run", [[], [{"step": 1, "loss": 2.0}], [{"step": 1, "step_s": None, "tokens_per_s": None}]])
def test_records_without_times_give_no_numbers_and_no_verdict(run):
    summary = summarize(run, {})
    assert (summary.tokens_per_s, summary.data_wait_share, summary.is_input_bound) == (None, None, False)
    assert summary.verdict == "waiting for data was not measured"


def test_steps_without_duration_give_no_verdict():
    assert summarize([{"step": 1, "step_s": 0.0, "data_wait_s": 0.0}], {}).data_wait_share is None
