"""Tokens of a text are those that a request would have; detokenizing is the inverse."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.inputs.tokenizers import CharTokenizer
from jaxml.serve.token_calls import detokenize, tokenize
from tests.serve.asking import BYTES, CONTEXT, HELLO, SUBWORD, chat, completion, model, refusal


def tokens(**body: Any) -> dict[str, Any]:
    return tokenize(body, model(SUBWORD))


def test_a_prompt_has_the_tokens_that_a_completion_reads() -> None:
    told = tokens(prompt="hello")
    assert told["tokens"] == list(completion(SUBWORD, prompt="hello").choices[0].prompt)
    assert (told["count"], told["max_model_len"], told["token_strs"]) == (len(told["tokens"]), CONTEXT, None)


def test_a_conversation_has_the_tokens_that_a_chat_reads() -> None:
    assert tokens(messages=HELLO)["tokens"] == list(chat().choices[0].prompt)
    assert tokens(messages=HELLO, add_generation_prompt=True)["count"] == len(chat().choices[0].prompt)


def test_the_start_token_can_be_left_out_and_tokens_have_names() -> None:
    told = tokens(prompt="h", add_special_tokens=False, return_token_strs=True)
    assert (told["tokens"], told["token_strs"]) == (SUBWORD.encode("h"), ["h"])
    assert tokens(prompt="h", return_token_strs=True)["token_strs"] == ["<s>", "h"]
    assert tokens(prompt="", add_special_tokens=False)["tokens"] == []


@given(text=st.text(st.characters(codec="utf-8"), max_size=20))
def test_detokenizing_is_the_inverse(text: str) -> None:
    for tokenizer in (BYTES, SUBWORD):
        ids = tokenize({"prompt": text}, model(tokenizer))["tokens"]
        assert detokenize({"tokens": ids}, model(tokenizer)) == {"prompt": text}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a", "messages": HELLO}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": HELLO, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ({"prompt": "a", "x": 1}, "x"),
        ({"prompt": "a", "model": "other"}, "model"),
    ],
)
def test_what_is_wrong_is_refused_by_name(body: Any, field: str) -> None:
    assert refusal(tokenize, body, model(SUBWORD))[0] == field


def test_text_that_the_vocabulary_lacks_is_a_fault_of_the_prompt() -> None:
    assert refusal(tokenize, {"prompt": "x"}, model(CharTokenizer("abc")))[0] == "prompt"


@pytest.mark.parametrize("wrong", [None, 5, "a", ["a"], [-1], [10**9], [True], [1.0]])
def test_only_ids_of_the_vocabulary_have_a_text(wrong: Any) -> None:
    assert refusal(detokenize, {"tokens": wrong}, model(BYTES))[0] == "tokens"
    assert detokenize({"tokens": []}, model(BYTES)) == {"prompt": ""}
