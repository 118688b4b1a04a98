"""The tokenizer of a published directory: which tokens begin and end a text, and which chat template is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from jaxml.checkpoint.hf_tokenizer import read_tokenizer
from jaxml.errors import CheckpointError, DataError
from jaxml.inputs.tokenizers import load_tokenizer

WORDS = {"<s>": 0, "</s>": 1, "<turn>": 2, "a": 3, "b": 4}


def directory(
    place: Path, settings: dict[str, Any] | None = None, config: dict[str, Any] | None = None, begins: bool = True
) -> Path:
    """A word tokenizer; `begins`: its own post-processor puts <s> in front of a text."""
    library = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>", "</s>", "<turn>"])
    if begins:
        library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    place.mkdir(exist_ok=True)
    library.save(str(place / "tokenizer.json"))
    for name, value in (("tokenizer_config.json", settings), ("config.json", config)):
        if value is not None:
            (place / name).write_text(json.dumps(value))
    return place


NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        (NAMED, {}),
        ({"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>", "lstrip": False}}, {"eos_token_id": 2}),
        (None, {"bos_token_id": 0, "eos_token_id": 1}),
        ({"bos_token": None}, {"bos_token_id": [0], "eos_token_id": [1]}),
    ],
)
def test_begin_and_end_are_named_by_the_settings_or_else_by_the_config(tmp_path, settings, config):
    tokenizer, _ = read_tokenizer(directory(tmp_path, settings, config))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.encode("b a") == [4, 3]


def test_without_names_there_are_no_such_tokens(tmp_path):
    tokenizer, notes = read_tokenizer(directory(tmp_path, {}, {"eos_token_id": None}))
    assert (tokenizer.bos_id, tokenizer.eos_id, notes) == (None, None, ())


@pytest.mark.parametrize(
    ("begins", "wish", "bos"), [(True, None, 0), (False, None, None), (False, True, 0), (True, False, None)]
)
def test_a_text_begins_with_bos_only_where_the_published_tokenizer_puts_it(tmp_path, begins, wish, bos):
    tokenizer, notes = read_tokenizer(directory(tmp_path, NAMED | {"add_bos_token": wish}, {}, begins))
    assert tokenizer.bos_id == bos
    assert [note for note in notes if "<s>" in note] == (
        [] if bos == 0 else ["texts do not begin with <s>: the published tokenizer does not put it there"]
    )


def test_further_end_tokens_are_told(tmp_path):
    place = directory(tmp_path, NAMED, {"eos_token_id": [1]})
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert "2 <turn>" in "\n".join(read_tokenizer(place)[1])


@pytest.mark.parametrize(
    ("template", "expected", "told"),
    [
        (None, None, ""),
        ("plain", "plain", ""),
        ([{"name": "default", "template": "d"}, {"name": "tools", "template": "t"}], "d", "tools"),
        ([{"name": "tools", "template": "t"}], None, "tools"),
    ],
)
def test_the_chat_template_is_the_only_one_or_the_default_of_several(tmp_path, template, expected, told):
    tokenizer, notes = read_tokenizer(directory(tmp_path, NAMED | {"chat_template": template}, {}))
    assert tokenizer.chat_template == expected
    assert told in "\n".join(notes)


def test_a_template_in_its_own_file_goes_before_that_of_the_settings(tmp_path):
    place = directory(tmp_path, NAMED | {"chat_template": "old"}, {})
    (place / "chat_template.jinja").write_text("new ∀")
    tokenizer, _ = read_tokenizer(place)
    assert tokenizer.chat_template == "new ∀"
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").chat_template == "new ∀"


@pytest.mark.parametrize("template", [3, {"name": "x"}, ["text"], [{"name": "default", "template": 1}]])
def test_a_template_that_is_no_text_is_refused(tmp_path, template):
    with pytest.raises(CheckpointError, match="chat_template"):
        read_tokenizer(directory(tmp_path, NAMED | {"chat_template": template}, {}))


def test_files_that_are_not_what_their_names_say_are_refused(tmp_path):
    place = directory(tmp_path, {}, {})
    (place / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="UTF-8"):
        read_tokenizer(place)
    (place / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        read_tokenizer(place)
    (place / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        read_tokenizer(place)


def test_a_named_token_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.eos"):
        read_tokenizer(directory(tmp_path, {"eos_token": "<end>"}, {}))


def test_without_a_tokenizer_file_the_report_says_so(tmp_path):
    tokenizer, notes = read_tokenizer(tmp_path)
    assert tokenizer is None
    assert "token ids only" in notes[0]
