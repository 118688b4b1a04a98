"""Small models that these tests share, written once: a language model over bytes, and one over six letters."""

from __future__ import annotations

import dataclasses

import pytest

from jaxml.infer.language_model import LanguageModel
from jaxml.inputs.tokenizers import CharTokenizer
from jaxml.tasks.spec import LanguageModeling
from tests.infer.written import small_decoder, write


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> LanguageModel:
    """Bytes, a context of 192 tokens: one step of the ladder of capacities (128) and then the whole."""
    return LanguageModel.open(
        write(tmp_path_factory.mktemp("bytes"), small_decoder(context_length=192), LanguageModeling(), {})
    )


@pytest.fixture(scope="session")
def letters(tmp_path_factory) -> LanguageModel:
    """Six letters, of which the last one ends an answer, and a context of 16 tokens."""
    spec = dataclasses.replace(small_decoder(context_length=16), vocab_size=6)
    path = write(tmp_path_factory.mktemp("letters"), spec, LanguageModeling(), {}, CharTokenizer("abcdef"))
    opened = LanguageModel.open(path)
    opened.eos = (5,)
    return opened
