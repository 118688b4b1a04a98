"""Bodies of requests as a model with few tokens reads them, for the tests of what can be asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tokenizers as library

from jaxml.errors import RequestError
from jaxml.infer.request import LANES, Lane
from jaxml.inputs.spec import BpeTokenizerSpec, HuggingFaceTokenizerSpec
from jaxml.inputs.subword import SubwordTokenizer
from jaxml.inputs.tokenizers import ByteTokenizer, Tokenizer, build_tokenizer
from jaxml.serve.requests import CompletionCall, parse_chat, parse_completion
from jaxml.serve.served import Limits, Served

CONTEXT = 64
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]


def with_template(template: str | None = TEMPLATE) -> SubwordTokenizer:
    """A byte-level BPE with a start token and those of a conversation."""
    trained = build_tokenizer(BpeTokenizerSpec(258), ["hello hello"])
    made = library.Tokenizer.from_str(trained.files()["tokenizer.json"].decode())
    made.add_special_tokens(["<s>", "<|user|>", "<|assistant|>", "<|system|>"])
    spec = HuggingFaceTokenizerSpec("tokenizer.json", eos="<|endoftext|>", bos="<s>")
    return SubwordTokenizer(spec, made.to_str().encode(), "a test", template)


BYTES, SUBWORD = ByteTokenizer(), with_template()


def model(tokenizer: Tokenizer, context: int = CONTEXT, **fields: Any) -> Served:
    """What is served, under the name "shk"."""
    return Served("shk", tokenizer, context, **fields)


def completion(
    tokenizer: Tokenizer = BYTES,
    context: int = CONTEXT,
    limits: Limits = Limits(),
    lanes: tuple[Lane, ...] = LANES,
    **body: Any,
) -> CompletionCall:
    return parse_completion({"prompt": "hello", **body}, model(tokenizer, context, limits=limits), lanes)


def chat(
    tokenizer: Tokenizer = SUBWORD,
    context: int = CONTEXT,
    limits: Limits = Limits(),
    lanes: tuple[Lane, ...] = LANES,
    **body: Any,
) -> CompletionCall:
    return parse_chat({"messages": HELLO, **body}, model(tokenizer, context, limits=limits), lanes)


def refusal(parse: Callable[..., Any], *args: Any, **body: Any) -> tuple[str, str]:
    """(the first fault's field, everything that was said)."""
    with pytest.raises(RequestError) as caught:
        parse(*args, **body)
    return caught.value.faults[0].failed, str(caught.value)
