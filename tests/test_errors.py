"""Errors say what failed, expected, got and what to do; edges collect all their faults; a missing extra is named."""

from __future__ import annotations

import pickle
import sys

import pytest

from jaxml import errors
from jaxml.errors import (
    ConfigError,
    DataError,
    Fault,
    Faults,
    JaxmlError,
    MissingExtraError,
    RequestError,
    require_extra,
)

ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, JaxmlError)]
FAULT = {"failed": "train.steps", "expected": "at least 1", "got": "0", "todo": "pass --train.steps 100"}


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_has_the_four_parts_in_order(error):
    raised = error(FAULT["failed"], expected=FAULT["expected"], got=FAULT["got"], todo=FAULT["todo"])
    assert raised.faults == (Fault(**FAULT),)
    text = str(raised)
    assert [text.index(part) for part in FAULT.values()] == sorted(text.index(part) for part in FAULT.values())


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_leaves_with_a_code_that_is_not_success(error):
    assert error.exit_code == (2 if error in (ConfigError, RequestError) else 1)


def test_faults_are_raised_together_numbered_and_in_order():
    faults = Faults(DataError)
    for name in ("one", "two", "three"):
        faults.add(name, expected="good", got="bad", todo="mend it")
    with pytest.raises(DataError) as caught:
        faults.raise_if_any()
    assert [fault.failed for fault in caught.value.faults] == ["one", "two", "three"]
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 faults"
    assert [line for line in lines if line[0] in "123" and line[1] == "."] == ["1. one", "2. two", "3. three"]


def test_a_single_fault_is_not_numbered():
    faults = Faults(ConfigError)
    faults.add(**FAULT)
    with pytest.raises(ConfigError) as caught:
        faults.raise_if_any()
    assert str(caught.value) == str(Fault(**FAULT))


def test_no_fault_raises_nothing():
    Faults(ConfigError).raise_if_any()


def test_require_extra_imports_what_is_there():
    assert require_extra("json.decoder", "track") is sys.modules["json.decoder"]


def test_a_missing_module_names_the_extra_and_the_command():
    with pytest.raises(MissingExtraError) as caught:
        require_extra("jaxml_no_such_module", "track")
    fault = caught.value.faults[0]
    assert fault.failed == "import of jaxml_no_such_module"
    assert "'track'" in fault.expected
    assert fault.todo == "python -m pip install 'jaxml[track]'"
    assert isinstance(caught.value.__cause__, ImportError)


def test_an_error_survives_a_process_border() -> None:
    error = ConfigError.from_faults([Fault("a", "b", "c", "d"), Fault("e", "f", "g", "h")])
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.faults, str(copy)) == (ConfigError, error.faults, str(error))
