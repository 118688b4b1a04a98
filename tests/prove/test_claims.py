"""The bound in float64, what it leaves out, and what a claim says as JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from jaxml.prove.claims import BOUND, FLOOR, Claim, Parting, distances, exact, undecided


def test_errors_are_shares_of_each_leaf_s_own_magnitude() -> None:
    expected = {"a": np.array([1000.0, 1.0]), "b": np.array([0.5])}
    found = distances({"a": expected["a"] + [0.0, 1e-6], "b": expected["b"] + 1e-6}, expected)
    assert found["a"] == pytest.approx(1e-9)
    assert found["b"] == pytest.approx(2e-6)


def test_a_leaf_that_is_rounding_alone_is_held_to_a_millionth_of_the_largest() -> None:
    expected = {"bias": np.array([1e-18]), "kernel": np.array([2.0])}
    found = distances({"bias": np.array([-1e-18]), "kernel": np.array([2.0])}, expected)
    assert found["bias"] == pytest.approx(2e-18 / (FLOOR * 2.0))
    assert found["bias"] < BOUND


@pytest.mark.parametrize(
    "got",
    [{}, {"a": np.ones(3)}, {"a": np.array([1.0, math.nan])}, {"a": np.array([1.0, math.inf])}],
    ids=["missing", "shape", "nan", "infinite"],
)
def test_what_cannot_be_compared_is_infinitely_far(got: dict[str, np.ndarray]) -> None:
    assert distances(got, {"a": np.ones(2)}) == {"a": math.inf}


def test_a_leaf_that_nobody_expected_and_an_integer_that_differs_are_infinitely_far() -> None:
    assert distances({"n": np.array(3), "x": np.ones(1)}, {"n": np.array(2)}) == {"n": math.inf, "x": math.inf}
    assert distances({"n": np.array(2)}, {"n": np.array(2)}) == {"n": 0.0}


def test_only_elements_below_the_floor_that_differ_are_undecided() -> None:
    expected = {"a": np.array([1.0, 1e-12, 1e-12, 0.0])}
    got = {"a": np.array([1.1, -1e-12, 1e-12, 0.0])}
    assert undecided(got, expected)["a"].tolist() == [False, True, False, False]


def test_an_error_that_is_not_a_number_fails_and_is_null_in_json() -> None:
    claim = Claim("g", "n", math.nan, BOUND, float32=math.inf)
    assert claim.verdict == "fail"
    told = json.loads(json.dumps(claim.to_json(), allow_nan=False))
    assert (told["error"], told["float32_error"], told["verdict"]) == (None, None, "fail")


def test_json_has_what_programs_need() -> None:
    claim = Claim("sharded", "data=8", 1e-3, 1e-9, parting=Parting("query, layer 0", "jaxml/x.py, line 3", 0.1))
    told = claim.to_json()
    assert told["name"] == "sharded: data=8"
    assert (told["error"], told["bound"], told["verdict"]) == (1e-3, 1e-9, "fail")
    assert told["first_parting"] == {"name": "query, layer 0", "made_by": "jaxml/x.py, line 3"}


def test_a_claim_of_equality_counts_and_tells_the_first_faults() -> None:
    claim = exact("g", "n", [f"fault {n}" for n in range(5)], "nothing")
    assert (claim.error, claim.bound, claim.verdict) == (5.0, 0.0, "fail")
    assert claim.detail == "fault 0; fault 1; fault 2; and 2 more"
    assert exact("g", "n", [], "nothing").detail == "nothing"
