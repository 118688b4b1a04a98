"""Exact ranking metrics of scores that fit on one host, in NumPy. No jax.

Reads no other jaxml file; `tasks.classification` and experiments use it.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float


def log_odds(log_probs_BC: Float[np.ndarray, "B C"], positive: int) -> Float[np.ndarray, " B"]:
    """log(p / (1 - p)) of one class, in float64.

    Ranks rows as p does, and still tells apart rows whose p rounds to 1: the others' log probabilities keep the margin.
    """
    scores_BC = np.asarray(log_probs_BC, np.float64)
    return scores_BC[:, positive] - np.logaddexp.reduce(np.delete(scores_BC, positive, axis=1), axis=1)


def roc_auc(scores_B: Float[np.ndarray, " B"], is_positive_B: Bool[np.ndarray, " B"]) -> float:
    """The probability that a positive row scores above a negative one, ties counting half (Mann-Whitney U / (P N)).

    Exact in O(B log B) by mean ranks. Needs rows of both classes; NaN when a score is NaN.

    >>> roc_auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True]))
    0.875
    """
    if np.isnan(scores_B).any():
        return float("nan")
    _, place, counts = np.unique(scores_B, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2
    num_positive = int(is_positive_B.sum())
    num_negative = is_positive_B.size - num_positive
    rank_sum = mean_ranks[place.reshape(-1)][is_positive_B].sum()
    return float((rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))
