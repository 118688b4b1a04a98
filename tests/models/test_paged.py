"""Extending rows whose keys and values lie in scattered pages is the same as one pass over the whole row, in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml.models import paged
from jaxml.models.paged import PagedCache, attend_pages, empty_pages, page_bytes
from tests.models import tiny
from tests.models.test_cache import CAUSAL, TOKENS, assert_close, assert_goes_on, extend, params_of, whole

PAGE = 4
# Row 0 owns pages 5, 2, 6 and row 1 pages 3, 1, 4; one entry more than a row needs, for a piece that runs over its end.
TABLE = np.array([[5, 2, 6, 0], [3, 1, 4, 0]], np.int32)


def pages_of(name: str, fill: float = 0.0) -> PagedCache:
    filled = jax.tree.map(lambda leaf: leaf + fill, empty_pages(tiny.SPECS[name], 6, PAGE, jnp.float64))
    return PagedCache(*filled, jnp.asarray(TABLE))


@pytest.fixture(params=[1, 2], ids=["a page a turn", "two pages a turn"])
def pages_a_turn(request, monkeypatch):
    """Several turns, though the rows are short."""
    monkeypatch.setattr(paged, "MAX_TURN_TOKENS", PAGE * request.param)


@pytest.mark.parametrize("name", CAUSAL)
def test_pieces_in_pages_equal_one_pass_whatever_the_pages_held(name):
    """Not-a-numbers in every slot that no token of the row wrote."""
    with jax.enable_x64(True):
        params, run = params_of(name, True), extend(name, True)
        cached = pages_of(name, np.nan)
        for start in (0, 4):
            features, cached = run(params, TOKENS[:, start : start + 4], np.full(2, start, np.int32), cached)
            assert_close(np.asarray(features), whole(name)[:, start : start + 4])


@pytest.mark.parametrize("name", CAUSAL)
def test_rows_that_end_apart_are_decoded_as_if_alone_in_scattered_pages(name):
    with jax.enable_x64(True):
        params, run = params_of(name, True), extend(name, True)
        begun = TOKENS[:, :4].copy()
        begun[1, 2:] = 31
        _, cached = run(params, begun, np.zeros(2, np.int32), pages_of(name))
        assert_goes_on(name, partial(run, params), cached)


def attention(positions: np.ndarray, window: int | None, table: np.ndarray, fill: float) -> Any:
    """Of random queries over six random pages, with `fill` beyond each row's position."""
    chance = np.random.default_rng(0)
    rows, tokens = positions.shape
    q = chance.normal(size=(rows, tokens, 4, 8))
    pages = [chance.normal(size=(7, 2, PAGE, 8)) for _ in range(2)]
    for row in range(rows):
        for slot in range(positions[row].max() + 1, table.shape[1] * PAGE):
            for leaf in pages:
                leaf[table[row, slot // PAGE], :, slot % PAGE] = fill
    run = jax.jit(lambda q, keys, values, *where: attend_pages(q, keys, values, *where, window, None))
    return q, pages, np.asarray(run(q, *pages, table, positions))


@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_pages_is_the_softmax_over_the_slots_seen(window, pages_a_turn):
    with jax.enable_x64(True):
        positions = np.array([[9], [2]], np.int32)
        q, (keys, values), got = attention(positions, window, TABLE, np.nan)
        for row, position in enumerate(positions[:, 0]):
            first = 0 if window is None else max(0, position - window + 1)
            slots = range(first, position + 1)
            k, v = (
                np.stack([np.asarray(x[TABLE[row, s // PAGE], :, s % PAGE]) for s in slots]) for x in (keys, values)
            )
            for head in range(4):
                scores = k[:, head // 2] @ np.asarray(q[row, 0, head]) / np.sqrt(8)
                weights = np.exp(scores - scores.max())
                assert_close(got[row, 0, head], weights / weights.sum() @ v[:, head // 2])


def test_a_longer_neighbour_changes_no_bit_of_a_row(pages_a_turn):
    """More turns than a row needs, before and after those in which it sees something, leave it exactly as it was."""
    short = np.array([[1], [2]], np.int32)
    for window in (None, 2):
        alone = attention(short, window, TABLE, np.nan)[2][1]
        beside = attention(np.array([[11], [2]], np.int32), window, TABLE, np.nan)[2][1]
        np.testing.assert_array_equal(alone, beside)


def test_the_bytes_of_a_page_are_those_of_its_arrays():
    spec = tiny.SPECS["gemma"]
    keys, values = empty_pages(spec, 3, PAGE, jnp.float32)
    assert sum(leaf.nbytes for leaf in (*keys, *values)) == 4 * page_bytes(spec, PAGE, jnp.float32)
