"""Sets of questions: the files, the border between context and continuation, the accuracies by hand, a real set by NumPy."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from jaxml.errors import DataError
from jaxml.infer.eval_sets import (
    Choice,
    Estimate,
    Match,
    choice_result,
    encode_pair,
    evaluate_choices,
    evaluate_matches,
    normalized,
    option_logprobs,
    read_set,
)
from jaxml.infer.language_model import LanguageModel
from jaxml.infer.opening import Opened, open_checkpoint
from jaxml.inputs.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer
from jaxml.recipes.importing import import_model
from tests.infer.tiny_llama import CONTEXT, TENSORS, TINY, open_tiny, reference_scores
from tests.reference import llama

LETTERS = "\n abcdefghijklmnopqr"  # one for each of the 20 ids


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    opened = open_tiny(tmp_path_factory.mktemp("tiny"))
    return dataclasses.replace(opened, tokenizer=CharTokenizer(LETTERS))


@pytest.fixture(scope="module")
def stories(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A trained model with a subword tokenizer."""
    out = tmp_path_factory.mktemp("stories") / "checkpoint"
    import_model(assets / "stories260k-hf", out)
    return open_checkpoint(out)


@pytest.fixture(scope="module")
def model(opened: Opened) -> LanguageModel:
    return LanguageModel(opened)


def written(place: Path, *items: object) -> Path:
    file = place / "set.jsonl"
    file.write_text("\n\n".join(json.dumps(item) for item in items))
    return file


def choice(*options: str, gold: int = 0, context: str = "a") -> Choice:
    return Choice(1, tuple((context, option) for option in options), gold)


@pytest.mark.parametrize(
    ("name", "kind", "num_items"),
    [
        ("arc_easy", Choice, 2376),
        ("bigbench_movie_recommendation", Choice, 500),
        ("copa", Choice, 100),
        ("hellaswag_small", Choice, 4),
        ("mmlu_small", Choice, 4),
        ("winograd_wsc", Choice, 273),
        ("bigbench_simple_arithmetic", Match, 60),
        ("lambada_small", Match, 4),
        ("gsm8k", Match, 1319),
        ("triviaqa_small", Match, 4),
    ],
)
def test_real_sets_are_read_whole(assets, name, kind, num_items):
    items = read_set(assets / "eval-tasks" / f"{name}.jsonl")
    assert len(items) == num_items
    assert {type(item) for item in items} == {kind}


def test_items_have_the_fields_of_their_lines(tmp_path):
    schema = {"context_options": ["he", "she"], "continuation": "ran", "gold": 1}
    query = {"query": "q", "choices": ["x", "y", "z"], "gold": 2, "category": "any"}
    assert read_set(written(tmp_path, schema, query)) == [
        Choice(1, (("he", "ran"), ("she", "ran")), 1),
        Choice(3, (("q", "x"), ("q", "y"), ("q", "z")), 2),
    ]
    answer = {"context": "c", "answer": "1", "aliases": ["one"], "chain_of_thought": "-"}
    assert read_set(written(tmp_path, {"context": "c", "continuation": "d"}, answer)) == [
        Match(1, "c", ("d",), is_exact=True),
        Match(3, "c", ("1", "one"), is_exact=False),
    ]
    assert len(read_set(written(tmp_path, query, query, query), limit=2)) == 2


@pytest.mark.parametrize(
    ("item", "named"),
    [
        ({"query": "q", "choices": ["x", "y"], "gold": 2}, "line 3: gold"),
        ({"query": "q", "choices": ["x", "y"], "gold": True}, "line 3: gold"),
        ({"query": "q", "choices": ["x"], "gold": 0}, "line 3"),
        ({"query": "q", "choices": ["x", 1], "gold": 0}, "line 3"),
        ({"query": "q", "choices": "xy", "gold": 0}, "line 3"),
        ({"task_id": "HumanEval/0", "prompt": "def f():", "test": "..."}, "fields task_id, prompt, test"),
        (["query"], "line 3"),
        ({"context": "c", "continuation": "d"}, "both"),
    ],
)
def test_a_line_that_is_no_item_is_refused_by_its_number(tmp_path, item, named):
    with pytest.raises(DataError, match=named):
        read_set(written(tmp_path, {"query": "q", "choices": ["x", "y"], "gold": 0}, item))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"{", b"\xff\xfe\xff", b"[" * 100_000])
def test_a_file_that_is_no_jsonl_is_refused(tmp_path, content):
    (tmp_path / "set.jsonl").write_bytes(content)
    with pytest.raises(DataError):
        read_set(tmp_path / "set.jsonl")


@pytest.mark.parametrize(
    ("context", "continuation", "delimiter", "before", "after"),
    [
        ("A b", "c", " ", "A b", " c"),
        ("A b ", "c", " ", "A b", " c"),
        ("A b\n", "c", " ", "A b", "\nc"),
        ("A b", " c", " ", "A b", " c"),
        ("A b", "c", "", "A b", "c"),
        ("A b\n", "c", "\nAnswer: ", "A b\n\nAnswer:", " c"),
    ],
)
def test_white_space_at_the_border_belongs_to_the_continuation(context, continuation, delimiter, before, after):
    tokenizer = ByteTokenizer()
    found = encode_pair(tokenizer, context, continuation, delimiter, "line 1", 99)
    assert found == (tokenizer.encode(before), tokenizer.encode(after))


def test_the_continuation_is_the_whole_without_the_context(stories):
    tokenizer = stories.require_tokenizer()
    assert encode_pair(tokenizer, "Once upon a", "time", " ", "line 1", 99) == ([1, 403, 407, 261], [378])
    # Without white space the border can lie within a token, and then nothing is left of a short continuation.
    with pytest.raises(DataError, match="got:      0: 'ime'"):
        encode_pair(tokenizer, "Once upon a t", "ime", "", "line 1", 99)


@pytest.mark.parametrize("continuation", ["", "b" * (CONTEXT + 1), "z"])
def test_a_continuation_that_cannot_be_scored_is_refused_by_its_line(opened, continuation):
    item = Choice(7, (("a", "b"), ("a", continuation)), 0)
    with pytest.raises(DataError, match="line 7"):
        evaluate_choices(opened, [item], delimiter="")


def test_accuracies_and_their_errors_by_hand():
    items = [choice("aa", "bbbb", gold=0), choice("aa", "bbbb", gold=1), choice("c", "d", "e", gold=2)]
    sums = [(-3.0, -4.0), (-3.0, -4.0), (-2.0, -1.0, -1.0)]
    found = choice_result(items, sums)
    # By sum: right, wrong, wrong (of equal ones the first). By character, -1.5 against -1: wrong, right, wrong.
    error = math.sqrt(2 / 9 / 2)  # sqrt(p (1 - p) / (n - 1)) of p = 1/3, n = 3
    for name in ("accuracy", "accuracy_per_character"):
        assert found.estimates[name].value == pytest.approx(1 / 3)
        assert found.estimates[name].standard_error == pytest.approx(error)
    swapped = choice_result(items[:2], [(-3.0, -4.0), (-9.0, -4.0)])
    assert [swapped.estimates[n].value for n in ("accuracy", "accuracy_per_character")] == [1.0, 0.5]


def test_one_item_has_no_standard_error():
    assert math.isnan(Estimate.of([1.0]).standard_error)
    assert Estimate.of([1.0, 1.0]) == Estimate(1.0, 0.0)


def test_options_are_scored_by_their_continuation_alone(opened):
    items = [choice("bc", "d e", context="qa"), choice("f", "ghi", context="b")]
    sums, num_cut = option_logprobs(opened, items)
    encode = opened.require_tokenizer().encode
    for item, values in zip(items, sums, strict=True):
        for (context, text), value in zip(item.options, values, strict=True):
            expected = reference_scores(encode(f"{context} {text}"))[-len(text) - 1 :].sum()
            assert value == pytest.approx(expected, abs=1e-4)
    assert num_cut == 0


def test_what_is_too_long_loses_its_beginning(opened):
    context = "abcdefghijklmnopqr" * 4
    sums, num_cut = option_logprobs(opened, [choice("bc", "d", context=context)])
    ids = opened.require_tokenizer().encode(f"{context} bc")[-CONTEXT - 1 :]
    assert sums[0][0] == pytest.approx(reference_scores(ids)[-3:].sum(), abs=1e-4)
    assert num_cut == 2


def greedy(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    """What the NumPy model goes on with."""
    ids = tokenizer.encode(text)
    for _ in range(num_tokens):
        ids.append(int(llama.logits(TINY, TENSORS, ids[-CONTEXT:])[-1].argmax()))
    return tokenizer.decode(ids)[len(text) :]


def test_a_continuation_is_right_when_greedy_generation_says_it_token_for_token(model):
    tokenizer = model.opened.require_tokenizer()
    said = {context: greedy(tokenizer, context, 4) for context in ("abc", "dq", "hello")}
    other = {"b": "c"}.get(said["dq"][-1], "b")
    items = [
        Match(1, "abc", (said["abc"],), is_exact=True),
        Match(2, "dq", (said["dq"][:-1] + other,), is_exact=True),
        Match(3, "hello", (said["hello"][:2],), is_exact=True),
    ]
    found = evaluate_matches(model, items, delimiter="")
    assert found.estimates["exact_match"].value == pytest.approx(2 / 3)
    assert (found.num_items, found.num_cut) == (3, 0)


def test_an_answer_is_right_when_it_is_one_of_those_given_up_to_the_end_of_the_line(model):
    tokenizer = model.opened.require_tokenizer()
    line, end_of_line, rest = greedy(tokenizer, "co", 6).partition("\n")
    assert line and end_of_line and rest
    long = "abcdefghijklmnopqr" * 3
    items = [
        Match(1, "co", ("never", f" {line.upper()}. "), is_exact=False),
        Match(2, "co", (f"{line}x",), is_exact=False),
        Match(3, long, (greedy(tokenizer, long[-CONTEXT + 6 :], 6).partition("\n")[0],), is_exact=False),
    ]
    found = evaluate_matches(model, items, delimiter="", max_tokens=6)
    assert found.estimates["exact_match"].value == pytest.approx(2 / 3)
    assert found.num_cut == 1


def test_answers_are_compared_without_case_punctuation_and_articles():
    assert normalized("The  Beatles!") == normalized("beatles")
    assert normalized("an answer") != normalized("another")


def test_a_real_set_has_the_scores_of_numpy_on_the_published_files(assets, stories):
    folder = assets / "stories260k-hf"
    sums, _ = option_logprobs(stories, read_set(assets / "eval-tasks" / "copa.jsonl", limit=6))
    config = json.loads((folder / "config.json").read_text()) | {"rope_theta": 10_000.0}
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    lines = (assets / "eval-tasks" / "copa.jsonl").read_text().splitlines()
    for line, values in zip(map(json.loads, lines[:6]), sums, strict=True):
        context = library.encode(line["query"]).ids
        for option, value in zip(line["choices"], values, strict=True):
            ids = library.encode(f"{line['query']} {option}").ids
            logits = llama.logits(config, weights, ids[:-1])
            shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            expected = np.log(shares[np.arange(len(ids) - 1), ids[1:]])[len(context) - 1 :].sum()
            assert value == pytest.approx(expected, abs=1e-3)
