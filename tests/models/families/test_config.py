"""A published config.json: nothing that matters is passed over in silence."""

from __future__ import annotations

import pytest

from jaxml.errors import CheckpointError
from jaxml.models.families.config import HARMLESS, TOKEN_IDS, PublishedConfig, ignored_keys


def test_every_fault_is_told_at_once_and_names_its_key():
    keys = PublishedConfig({"size": 0, "number": float("nan"), "flag": "yes", "odd": 3, "inner": [], "kind": "b"})
    keys.size("size")
    keys.size("absent")
    keys.number("number")
    keys.flag("flag", False)
    keys.inner("inner")
    keys.only("kind", "a")
    with pytest.raises(CheckpointError) as raised:
        keys.finish()
    named = [fault.failed.removeprefix("config.json: ") for fault in raised.value.faults]
    assert named == ["size", "absent", "number", "flag", "kind", "odd"]
    assert raised.value.faults[1].got == "nothing"


@pytest.mark.parametrize("value", [True, 1.5, "4", -1])
def test_a_size_is_a_whole_positive_number(value):
    keys = PublishedConfig({"size": value})
    keys.size("size")
    assert len(keys.faults.found) == 1


def test_defaults_stand_for_absent_and_null_keys():
    keys = PublishedConfig({"size": None})
    assert keys.size("size", 7) == 7
    assert keys.number("number", 2) == 2.0
    assert keys.flag("flag", True) is True
    assert keys.inner("inner") is None
    keys.only("kind", "a")
    keys.only("absent")
    keys.finish()


def test_a_key_that_has_no_allowed_value_is_refused_for_any():
    keys = PublishedConfig({"quantization_config": {"bits": 4}})
    keys.only("quantization_config")
    with pytest.raises(CheckpointError, match="quantization_config"):
        keys.finish()


def test_unread_keys_inside_an_object_are_refused_by_both_names():
    keys = PublishedConfig({"rope": {"kind": "x", "factor": 2.0}})
    inner = keys.inner("rope")
    inner.only("kind", "x")
    inner.refuse_unread()
    with pytest.raises(CheckpointError, match=r"config.json: rope: factor"):
        keys.finish()


def test_what_does_not_matter_is_listed_and_what_the_tokenizer_reads_is_not():
    config = {"use_cache": True, "torch_dtype": "float16", "eos_token_id": 2, "hidden_size": 4}
    assert ignored_keys(config) == ("torch_dtype", "use_cache")
    PublishedConfig({**dict.fromkeys(HARMLESS, 1), **dict.fromkeys(TOKEN_IDS, 1)}).finish()
