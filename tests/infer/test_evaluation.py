"""The loss on a text: every token and every byte counted once, in windows that each say what they may see."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.errors import RequestError
from jaxml.infer.evaluation import TextLoss, evaluate_text, windows
from jaxml.infer.opening import Opened, open_checkpoint
from jaxml.inputs.tokenizers import CharTokenizer
from jaxml.recipes.importing import import_model
from tests.infer.tiny_llama import CONTEXT, open_tiny, reference_scores

LETTERS = "abcdefghijklmnopqrsé"  # 20 ids; the last one writes two bytes


class Begun(CharTokenizer):
    """Texts begin with id 7."""

    bos_id = 7


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    opened = open_tiny(tmp_path_factory.mktemp("tiny"))
    return dataclasses.replace(opened, tokenizer=CharTokenizer(LETTERS))


@given(num_tokens=st.integers(2, 300), context=st.integers(1, 40), data=st.data())
def test_every_token_but_the_first_is_counted_in_exactly_one_window(num_tokens, context, data):
    stride = data.draw(st.integers(1, context))
    counted = []
    for window in windows(num_tokens, context, stride):
        assert window.end - window.start <= context + 1, "one token more than the context: the last is only predicted"
        for token in range(window.counted_from, window.end):
            assert token - window.start >= min(token, context - stride + 1)
            counted.append(token)
    assert counted == list(range(1, num_tokens))


@pytest.mark.parametrize(("stride", "step"), [(None, CONTEXT // 2), (7, 7), (CONTEXT, CONTEXT)])
def test_the_loss_is_that_of_numpy_over_the_same_windows(opened, stride, step):
    text = "".join(np.random.default_rng(1).choice(list(LETTERS), 103))
    ids = opened.tokenizer.encode(text)
    nats, end = 0.0, 1
    for start in range(0, len(ids), step):
        piece = ids[start : start + CONTEXT + 1]
        if start + len(piece) > end:
            nats -= reference_scores(piece)[end - start - 1 :].sum()
            end = start + len(piece)
    assert end == len(ids) == 103
    found = evaluate_text(opened, text, stride)
    assert found.nats == pytest.approx(nats, rel=1e-5)
    assert found.num_tokens == 102


def test_tokens_and_bytes_are_those_that_have_a_score(opened):
    text = "éaéb"
    bare = evaluate_text(opened, text)
    assert (bare.num_tokens, bare.num_bytes) == (3, 4), "the first token and its two bytes have nothing before them"
    assert bare.nats == pytest.approx(-reference_scores([19, 0, 19, 1]).sum(), rel=1e-5)
    begun = evaluate_text(dataclasses.replace(opened, tokenizer=Begun(LETTERS)), text)
    assert (begun.num_tokens, begun.num_bytes) == (4, 6)
    assert begun.nats == pytest.approx(-reference_scores([7, 19, 0, 19, 1]).sum(), rel=1e-5)


def test_loss_perplexity_and_bits_per_byte_by_hand():
    found = TextLoss(nats=6 * math.log(2), num_tokens=2, num_bytes=3, num_windows=1)
    assert found.loss == pytest.approx(3 * math.log(2))
    assert found.perplexity == pytest.approx(8)
    assert found.bits_per_byte == pytest.approx(2)
    assert TextLoss(2000.0, 2, 0, 1).perplexity == math.inf
    assert math.isnan(TextLoss(1.0, 1, 0, 1).bits_per_byte)


@pytest.mark.parametrize(("text", "stride"), [("", None), ("a", None), ("abc", 0), ("abc", CONTEXT + 1), ("abc", -1)])
def test_what_cannot_be_evaluated_is_refused(opened, text, stride):
    with pytest.raises(RequestError):
        evaluate_text(opened, text, stride)


def test_a_trained_model_has_the_published_loss_on_a_story(assets, tmp_path):
    import_model(assets / "stories260k-hf", tmp_path / "stories")
    opened = open_checkpoint(tmp_path / "stories")
    story = json.loads((assets / "stories260k-hf" / "reference.json").read_text())["tinystories_sample_first_story"]
    text = opened.tokenizer.decode(story["ids"][1:])
    found = evaluate_text(opened, text)
    assert (found.num_tokens, found.num_bytes) == (len(story["ids"]) - 1, len(text.encode()))
    assert found.loss == pytest.approx(story["mean_nll"], abs=1e-6)
