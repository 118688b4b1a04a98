"""Laws of the turn-taking measurement: who runs when, what is counted, and which numbers are refused."""

from __future__ import annotations

import pytest

from benchmarks.interleave import NoisyMeasurementError, Row, interleave, ratio


def test_rivals_take_turns_and_neither_always_goes_first():
    calls = []
    rivals = {name: lambda name=name: calls.append(name) or 1.0 for name in "AB"}
    interleave(rivals, unit="s", repeats=3)
    assert "".join(calls) == "AB" + "AB" + "BA" + "AB"


def test_the_warm_up_is_not_counted():
    values = iter([100.0, 1.0, 1.02, 1.01])
    row = interleave({"step": lambda: next(values)}, unit="s", repeats=3)["step"]
    assert row.values == (1.0, 1.02, 1.01)
    assert row.median == 1.01


def test_a_spread_beyond_the_limit_is_refused_and_named():
    values = iter([1.0, 1.0, 1.2, 1.0, 1.0, 1.0])
    with pytest.raises(NoisyMeasurementError, match=r"`noisy` is refused(.|\n)*at most 15%(.|\n)*got: 20%"):
        interleave({"noisy": lambda: next(values)}, unit="s")


def test_a_spread_at_the_limit_is_accepted():
    values = iter([1.0, 1.0, 1.15, 1.0, 1.0, 1.0])
    assert interleave({"step": lambda: next(values)}, unit="s", max_spread=0.1500001)["step"].median == 1.0


def test_a_ratio_cancels_what_slows_both_in_one_round():
    rows = {"ours": Row("ours", "tokens/s", (20.0, 10.0)), "theirs": Row("theirs", "tokens/s", (10.0, 5.0))}
    assert ratio(rows, of="ours", to="theirs").values == (2.0, 2.0)
    assert ratio(rows, of="ours", to="theirs").spread == 0.0
