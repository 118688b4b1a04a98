"""Scores against a NumPy model, whatever the lengths and neighbours; refusals; how many programs are compiled."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml.errors import CheckpointError, RequestError
from jaxml.infer import scoring
from jaxml.infer.opening import Opened
from jaxml.infer.scoring import padded_length, score, score_text, target_logprobs
from jaxml.inputs.tokenizers import CharTokenizer
from tests.infer.tiny_llama import CONTEXT, TINY, open_tiny, reference_scores

LETTERS = "abcdefghijklmnopqrst"  # one for each of the 20 ids


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return open_tiny(tmp_path_factory.mktemp("tiny"))


def random_ids(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, TINY["vocab_size"], num_tokens).tolist()


def test_scores_are_those_of_numpy_for_every_length_in_one_call(opened):
    lengths = [CONTEXT + 1, 1, 2, 17, 16, 18, CONTEXT, 33, 3]
    sequences = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    for ids, logprobs in zip(sequences, score(opened, sequences), strict=True):
        assert logprobs.shape == (len(ids) - 1,)
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, reference_scores(ids), rtol=0, atol=2e-5)


def test_any_number_of_sequences_compiles_few_programs(opened, monkeypatch):
    monkeypatch.setattr(scoring, "TOKENS_PER_CALL", 128)
    before = scoring._logprobs._cache_size()
    sequences = [random_ids(18 + number, number) for number in range(10)]
    scored = score(opened, sequences[:9]) + score(opened, sequences[9:])
    # Rows of 32 tokens: two calls of 4 rows and one of 1 row, then 1 row again.
    assert scoring._logprobs._cache_size() - before == 2
    for ids, logprobs in zip(sequences, scored, strict=True):
        np.testing.assert_allclose(logprobs, reference_scores(ids), rtol=0, atol=2e-5)


def test_no_sequences_have_no_scores(opened):
    assert score(opened, []) == []


def test_rows_are_padded_to_powers_of_two_up_to_the_context():
    for context_length in (1, 16, 40, 512):
        lengths = {padded_length(n, context_length) for n in range(context_length + 1)}
        assert max(lengths) <= context_length
        assert all(padded_length(n, context_length) >= n for n in range(context_length + 1))
        assert len(lengths) <= 1 + max(0, context_length.bit_length() - 4)


@pytest.mark.parametrize("chunk_bytes", [2**30, 700, 1])
def test_logits_in_chunks_give_the_same_scores(chunk_bytes):
    rng = np.random.default_rng(0)
    features, kernel = rng.normal(size=(3, 7, 4)).astype(np.float32), rng.normal(size=(4, 9)).astype(np.float32)
    targets = rng.integers(0, 9, (3, 7))
    logits = features.astype(np.float64) @ kernel
    expected = np.take_along_axis(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), targets[..., None], -1)[
        ..., 0
    ]
    seen = []

    def head(chunk):
        seen.append(chunk.shape[1])
        return chunk @ kernel

    got = jax.jit(lambda x, t: target_logprobs(head, x, t, chunk_bytes))(features, jnp.asarray(targets, jnp.int32))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    # 3 x 7 x 9 logits of 4 bytes are 756; the first entry is the abstract call that measures them.
    assert seen[1] == {2**30: 7, 700: 4, 1: 1}[chunk_bytes]


def test_everything_that_is_wrong_with_the_sequences_is_told_at_once(opened):
    with pytest.raises(RequestError) as raised:
        score(opened, [[1, 2], [], [0] * (CONTEXT + 2), [3, 20], [-1] * (CONTEXT + 3)])
    told = [(fault.failed, fault.got) for fault in raised.value.faults]
    assert told == [
        ("sequence 1", "none"),
        ("sequence 2", "42 tokens"),
        ("sequence 3", "20"),
        ("sequence 4", "-1, -1, -1, -1, -1"),
        ("sequence 4", "43 tokens"),
    ]
    assert "41 tokens" in raised.value.faults[1].expected and "shorten it by 1" in raised.value.faults[1].todo


def test_a_model_that_does_not_predict_tokens_is_refused(opened):
    described = dataclasses.replace(opened.described, model=dataclasses.replace(opened.model, is_causal=False))
    with pytest.raises(CheckpointError, match="bidirectional"):
        score(dataclasses.replace(opened, described=described), [[1, 2]])


def test_a_text_has_a_score_for_each_token_that_has_one_before_it(opened):
    with_letters = dataclasses.replace(opened, tokenizer=CharTokenizer(LETTERS))
    scored = score_text(with_letters, "cab")
    expected = reference_scores([2, 0, 1])
    assert (scored.tokens, scored.pieces) == ((2, 0, 1), ("c", "a", "b"))
    assert scored.logprobs[0] is None
    np.testing.assert_allclose(scored.logprobs[1:], expected, rtol=0, atol=2e-5)
    assert scored.sum == pytest.approx(expected.sum(), abs=1e-4)
    assert scored.mean == pytest.approx(expected.mean(), abs=1e-4)
    assert np.isnan(score_text(with_letters, "c").mean)
    with pytest.raises(RequestError):
        score_text(with_letters, "")
    with pytest.raises(CheckpointError, match="tokenizer"):
        score_text(opened, "cab")


def test_the_token_that_begins_a_text_is_not_scored_but_lets_the_first_one_be(opened):
    class Begun(CharTokenizer):
        bos_id = 19

    scored = score_text(dataclasses.replace(opened, tokenizer=Begun(LETTERS)), "cab")
    assert scored.tokens == (2, 0, 1)
    np.testing.assert_allclose(scored.logprobs, reference_scores([19, 2, 0, 1]), rtol=0, atol=2e-5)
