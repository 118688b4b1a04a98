"""The area under the curve against a count of all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.tasks.ranking import log_odds, roc_auc

# Few distinct scores, so that ties are common; and every sign and size.
SCORES = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5000001, 2.0, 1e9]), min_size=1, max_size=20)


@given(SCORES, SCORES)
def test_the_area_is_the_share_of_pairs_in_order_with_ties_counting_half(positives, negatives):
    scores = np.array(positives + negatives)
    is_positive = np.arange(scores.size) < len(positives)
    pairs = [(p > n) + 0.5 * (p == n) for p in positives for n in negatives]
    assert roc_auc(scores, is_positive) == pytest.approx(np.mean(pairs), rel=1e-12)
    assert roc_auc(-scores, is_positive) == pytest.approx(1 - np.mean(pairs), rel=1e-12, abs=1e-12)


def test_a_score_that_is_not_a_number_is_not_ranked():
    assert np.isnan(roc_auc(np.array([0.1, np.nan]), np.array([True, False])))


def test_log_odds_keep_the_order_of_rows_whose_probability_rounds_to_one():
    margins = np.array([20.0, 40.0, 30.0], np.float32)
    log_probs = np.stack([np.zeros(3, np.float32), -margins], axis=1)  # float32 log(1 - e^-20) rounds to 0
    assert np.argsort(log_odds(log_probs, 0)).tolist() == [0, 2, 1]
    assert np.allclose(log_odds(log_probs, 1), -margins)


def test_log_odds_of_several_classes_are_against_all_others():
    probabilities = np.array([[0.5, 0.3, 0.2]])
    assert np.allclose(log_odds(np.log(probabilities), 0), 0.0)
    assert np.allclose(log_odds(np.log(probabilities), 2), np.log(0.2 / 0.8))
