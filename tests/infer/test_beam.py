"""Beam search against every answer there is, over six letters."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from jaxml.errors import RequestError
from jaxml.infer.beam import beam_search

PROMPT, NUM_TOKENS, EOS = (0, 3), 3, 5


@pytest.fixture(scope="module")
def every_answer(letters):
    """(tokens without the end, sum of log-probabilities, tokens with the end, reason) of all answers of up to 3 tokens."""
    bound, opened = letters.opened.bound, letters.opened
    wholes = [*itertools.product(range(6), repeat=NUM_TOKENS)]
    tokens = np.array([PROMPT + whole for whole in wholes], np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)

    @jax.jit
    def log_probs(params, tokens, positions, segments):
        module = bound.bind(params)
        return jax.nn.log_softmax(module.logits(module(tokens, positions, segments)[0]))

    found = np.asarray(log_probs(opened.params, tokens, positions, np.ones_like(tokens)))
    answers = {}
    for index, whole in enumerate(wholes):
        length = whole.index(EOS) + 1 if EOS in whole else NUM_TOKENS
        places = np.arange(len(PROMPT) - 1, len(PROMPT) - 1 + length)
        total = float(found[index, places, whole[:length]].sum())
        reason = "stop" if EOS in whole else "length"
        answers[whole[:length]] = (tuple(t for t in whole[:length] if t != EOS), total, length, reason)
    return list(answers.values())


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0])
def test_a_beam_that_holds_everything_finds_the_best_answers(letters, every_answer, penalty):
    found = beam_search(letters, PROMPT, num_beams=36, max_tokens=NUM_TOKENS, length_penalty=penalty)
    ranked = sorted(every_answer, key=lambda answer: -answer[1] / answer[2] ** penalty)
    for got, (tokens, total, length, reason) in zip(found[:10], ranked, strict=False):
        assert (got.tokens, got.finish_reason) == (tokens, reason)
        np.testing.assert_allclose([got.logprob, got.score], [total, total / length**penalty], rtol=1e-4)


def test_a_beam_of_one_is_greedy(letters):
    (best,) = beam_search(letters, PROMPT, num_beams=1, max_tokens=6, length_penalty=1.0)
    (greedy,) = letters.generate([PROMPT], temperature=0.0, max_tokens=6)
    assert (best.tokens, best.finish_reason) == (greedy.tokens, greedy.finish_reason)


def test_a_wider_beam_scores_no_worse_here(letters):
    """No law in general, but of these fixed weights: a beam that loses its best answer would show."""
    scores = [beam_search(letters, PROMPT, num_beams=n, max_tokens=6, length_penalty=1.0)[0].score for n in (1, 4, 36)]
    assert scores == sorted(scores)


def test_the_answer_fills_the_context_at_most(letters):
    best = beam_search(letters, (0,) * 14, num_beams=2, max_tokens=None, length_penalty=1.0)[0]
    assert len(best.tokens) <= 2
    for beams, penalty in ((0, 1.0), (65, 1.0), (2, float("nan"))):
        with pytest.raises(RequestError, match="num_beams"):
            beam_search(letters, PROMPT, num_beams=beams, max_tokens=2, length_penalty=penalty)
    with pytest.raises(RequestError, match="at most 15 tokens"):
        beam_search(letters, (0,) * 16, num_beams=2, max_tokens=None, length_penalty=1.0)
