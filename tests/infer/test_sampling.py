"""The sampler against plain NumPy, and its law: what a row draws depends on that row alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxml.infer.request import GREEDY, Sampling
from jaxml.infer.sampling import Rows, _adjusted, _filtered, empty_rows, make_row, sample

V, R = 24, 4  # one compile for all tests but the statistical one
EOS = 7
PROMPT = (1, 2, 2, 3)

sampled = jax.jit(sample)
filtered = jax.jit(_filtered)


def row(sampling: Sampling = Sampling(), prompt: tuple[int, ...] = PROMPT, seed: int = 0, max_tokens: int = 9) -> Rows:
    return make_row(sampling, prompt, vocab_size=V, max_tokens=max_tokens, seed=seed, eos=(EOS,))


def stacked(*rows: Rows) -> Rows:
    """R rows: those given, then rows that are not in use."""
    fill = [empty_rows(1, V)] * (R - len(rows))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows, *fill)


def logits_of(seed: int, num_rows: int = R) -> np.ndarray:
    return (3 * np.random.default_rng(seed).normal(size=(num_rows, V))).astype(np.float32)


def draw(logits: np.ndarray, *rows: Rows) -> tuple[Rows, Any]:
    return jax.device_get(sampled(logits, stacked(*rows)))


def kept_by_numpy(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, token by token from the most likely down."""
    order = sorted(range(V), key=lambda token: -logits[token])
    order = order[:top_k] if top_k else order
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    probabilities = weights / weights.sum()
    kept, mass = set(), 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if mass < top_p and probability >= min_p * probabilities[0]:
            kept.add(token)
        mass += probability
    return kept


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, V + 3),
    top_p=st.sampled_from([0.05, 0.3, 0.61, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.011, 0.2, 1.0]),
)
def test_filters_keep_what_their_definition_keeps(seed, top_k, top_p, min_p):
    logits = logits_of(seed)
    kept = filtered(logits, stacked(row(Sampling(top_k=top_k, top_p=top_p, min_p=min_p))))
    assert set(np.flatnonzero(np.isfinite(kept[0]))) == kept_by_numpy(logits[0], top_k, top_p, min_p)
    np.testing.assert_array_equal(kept[1:], logits[1:])  # rows without filters keep every bit


def test_defaults_keep_every_token_and_temperature_zero_takes_the_most_likely():
    """A default that forced greedy would draw one token (tpu-inference 1386)."""
    logits = 0.1 * logits_of(0)
    drawn = {int(draw(logits, row(seed=seed))[1].token[0]) for seed in range(20)}
    assert len(drawn) > 5
    assert draw(logits, row(GREEDY))[1].token[0] == logits[0].argmax()


def test_frequencies_are_those_of_the_softmax_at_the_temperature():
    num_rows, temperature = 4000, 1.7
    logits = logits_of(3, 1)[0]
    one = row(Sampling(temperature=temperature))
    rows = jax.tree.map(lambda leaf: np.repeat(leaf, num_rows, axis=0), one)
    rows = dataclasses.replace(rows, seed=np.arange(num_rows, dtype=np.uint32))
    tokens = np.asarray(sampled(np.repeat(logits[None], num_rows, axis=0), rows)[1].token)
    weights = np.exp(logits / temperature - (logits / temperature).max())
    expected = num_rows * weights / weights.sum()
    observed = np.bincount(tokens, minlength=V)
    often = expected > 5
    chi_square = ((observed - expected)[often] ** 2 / expected[often]).sum()
    assert chi_square < 60  # 23 degrees of freedom at most: beyond 60 once in 30,000 sets of seeds


def test_a_row_draws_the_same_whoever_its_neighbours_are():
    logits = logits_of(4)
    mine = row(Sampling(temperature=0.9, top_p=0.8), seed=11)
    greedy, plain = row(GREEDY, seed=5), row(seed=6)
    penalised = row(Sampling(repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=4, num_logprobs=3), seed=7)
    expected = draw(logits, mine)[1].token[0]
    assert draw(logits, mine, greedy, plain, penalised)[1].token[0] == expected
    moved = draw(logits[[1, 0, 2, 3]], penalised, mine)[1].token[1]
    assert moved == expected
    for other in (greedy, plain):  # and the neighbours' own tokens do not depend on what it asked for
        alone = draw(logits[[1, 0, 2, 3]], other)[1].token[0]
        assert draw(logits, mine, other, penalised)[1].token[1] == alone


def test_a_draw_depends_on_seed_and_position_alone():
    logits = np.repeat(logits_of(5, 1), R, axis=0)
    longer = (1,) * 9
    drawn = draw(logits, row(seed=3), row(seed=3), row(seed=4), row(prompt=longer, seed=3))[1].token
    assert drawn[0] == drawn[1]
    history = dataclasses.replace(row(seed=3), counts=np.full((1, V), 2, np.int32))
    assert draw(logits, history)[1].token[0] == drawn[0]
    several = [draw(logits, row(seed=seed), row(prompt=longer, seed=seed))[1].token[:2] for seed in range(12)]
    assert any(here != there for here, there in several)


def test_penalties_equal_their_definition():
    logits = logits_of(6)
    counts = np.zeros((1, V), np.int32)
    counts[0, [3, 4]] = [2, 1]
    sampling = Sampling(
        temperature=0, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4, num_logprobs=0
    )
    for shift in range(V):  # greedy on rotated logits: every token is the best one once
        moved = np.roll(logits, shift, axis=1)
        expected = moved[0].astype(np.float64)
        for token in {*PROMPT, 3, 4}:
            expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
        expected -= 0.7 * (counts[0] > 0) + 0.4 * counts[0]
        penalised = dataclasses.replace(row(sampling), counts=counts)
        after, drawn = draw(moved, penalised)
        assert drawn.token[0] == expected.argmax()
        assert after.counts[0, drawn.token[0]] == counts[0, drawn.token[0]] + 1


def test_a_penalty_that_is_off_touches_no_bit_of_a_row_beside_one_that_is_on():
    logits = logits_of(9)
    rows = stacked(row(Sampling(repetition_penalty=1.5, min_tokens=3)), row())
    got = np.asarray(jax.jit(_adjusted)(logits, rows))
    np.testing.assert_array_equal(got[1], logits[1])
    assert (got[0, list(PROMPT)] != logits[0, list(PROMPT)]).all()


def test_logprobs_are_the_models_own():
    logits = logits_of(7)
    sampling = Sampling(temperature=0.3, top_k=2, repetition_penalty=2.0, num_logprobs=5, seed=1)
    drawn = draw(logits, row(sampling))[1]
    expected = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    np.testing.assert_allclose(drawn.logprob[0], expected[drawn.token[0]], rtol=1e-5)
    order = np.argsort(-expected)[:20]
    np.testing.assert_array_equal(drawn.top_tokens[0], order)
    np.testing.assert_allclose(drawn.top_logprobs[0], expected[order], rtol=1e-5)


def test_a_stop_token_waits_for_min_tokens_and_then_ends_the_row():
    logits = np.zeros((R, V), np.float32)
    logits[:, EOS], logits[:, 5], logits[:, 9] = 9, 8, 7
    rows = stacked(row(dataclasses.replace(GREEDY, min_tokens=2, stop_token_ids=(5,))), row(GREEDY))
    first, drawn = jax.device_get(sampled(logits, rows))
    assert drawn.token[:2].tolist() == [9, EOS]  # neither of the first row's stop tokens
    assert first.is_done.tolist() == [False, True, True, True]
    second, _ = jax.device_get(sampled(logits, first))
    third, drawn = jax.device_get(sampled(logits, second))
    assert (drawn.token[0], third.is_done[0], third.num_generated[0]) == (EOS, True, 3)


def test_max_tokens_ends_a_row_and_a_row_that_is_done_stays_as_it_is():
    logits = logits_of(8)
    rows, _ = draw(logits, row(GREEDY, max_tokens=2))
    assert not rows.is_done[0]
    rows, _ = jax.device_get(sampled(logits, rows))
    assert rows.is_done[0]
    assert rows.num_generated[0] == 2
    again, _ = jax.device_get(sampled(logits, rows))
    for name in Rows.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(again, name), getattr(rows, name))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-1.0, math.nan, math.inf)],
        *[("top_p", value) for value in (0.0, -0.1, 1.1, math.nan)],
        *[("min_p", value) for value in (-0.1, 1.5, math.nan)],
        *[("repetition_penalty", value) for value in (0.0, -1.0, math.nan, math.inf)],
        *[("presence_penalty", value) for value in (math.nan, math.inf)],
        *[("frequency_penalty", value) for value in (math.nan, -math.inf)],
        ("top_k", -1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("seed", -1),
        ("seed", 2**32),
        ("stop", ("",)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("stop_token_ids", (V,)),
        ("stop_token_ids", tuple(range(17))),
        ("num_logprobs", 21),
    ],
)
def test_a_value_out_of_range_is_named(field, value):
    assert [fault.failed for fault in Sampling(**{field: value}).faults(V)] == [field]
