"""The keyed permutation is a bijection with an exact inverse, and looks random from epoch to epoch."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxml.data.permutation import derive_keys, permute, unpermute


@settings(max_examples=50)
@given(n=st.integers(1, 700), seed=st.integers(0, 2**63 - 1), source=st.integers(0, 9), epoch=st.integers(0, 2**40))
def test_every_value_comes_once_and_the_inverse_leads_back(n: int, seed: int, source: int, epoch: int) -> None:
    keys = derive_keys(seed, source, np.full(n, epoch))
    indices = np.arange(n)
    values = permute(indices, n, keys)
    assert sorted(values.tolist()) == indices.tolist()
    np.testing.assert_array_equal(unpermute(values, n, keys), indices)


@settings(max_examples=50)
@given(n=st.integers(2**31, 2**45), epoch=st.integers(0, 1000))
def test_huge_sizes_stay_in_range_and_invert(n: int, epoch: int) -> None:
    indices = np.linspace(0, n - 1, 50).astype(np.int64)
    keys = derive_keys(1, 0, np.full(50, epoch))
    values = permute(indices, n, keys)
    assert values.min() >= 0
    assert values.max() < n
    np.testing.assert_array_equal(unpermute(values, n, keys), indices)


def test_each_element_uses_its_own_key() -> None:
    keys = derive_keys(3, 0, np.arange(20))
    together = permute(np.full(20, 7), 100, keys)
    alone = [permute(np.array([7]), 100, keys[i : i + 1])[0] for i in range(20)]
    assert together.tolist() == alone
    assert len(set(alone)) > 10


def test_orders_are_spread_evenly_over_epochs() -> None:
    keys = derive_keys(0, 0, np.arange(6000))
    orders = np.stack([permute(np.full(6000, i), 3, keys) for i in range(3)], axis=1)
    counts = Counter(map(tuple, orders.tolist()))
    assert len(counts) == 6  # every order of three rows occurs
    assert max(counts.values()) < 1.35 * 1000
    first = np.bincount(permute(np.zeros(6000, np.int64), 50, keys), minlength=50)
    assert ((first - 120) ** 2 / 120).sum() < 100  # chi-square with 49 degrees of freedom, far out


def test_seed_source_and_epoch_each_change_the_order() -> None:
    def order(seed: int, source: int, epoch: int) -> list[int]:
        return permute(np.arange(100), 100, derive_keys(seed, source, np.full(100, epoch))).tolist()

    orders = [order(0, 0, 0), order(1, 0, 0), order(0, 1, 0), order(0, 0, 1), order(1, 0, 1), order(0, 1, 1)]
    assert len(set(map(tuple, orders))) == len(orders)
