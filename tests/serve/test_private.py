"""The directory that a server's processes share is this user's alone, and what one writes there another reads whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxml.errors import CheckpointError, JaxmlError
from jaxml.serve.private import MAX_SOCKET_PATH, Private


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Private:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return Private.create()


def test_only_its_user_can_enter_it_and_it_can_be_removed(private: Private) -> None:
    assert os.stat(private.path).st_mode & 0o777 == 0o700
    private.write_card({})
    private.remove()
    private.remove()
    assert not os.path.exists(private.path)


def test_a_socket_in_it_has_a_path_that_the_system_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * MAX_SOCKET_PATH)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    private = Private.create()
    assert len(private.socket) <= MAX_SOCKET_PATH and list(deep.iterdir()) == []
    private.remove()


def test_cards_and_failures_are_read_as_they_were_written(private: Private) -> None:
    assert private.card() is None and private.failure() is None
    private.write_card({"name": "a"})
    assert private.card() == {"name": "a"}
    private.write_failure(CheckpointError("a", expected="b", got="c", todo="d"))
    failure = private.failure()
    assert type(failure) is CheckpointError and str(failure) == "a\n  expected: b\n  got:      c\n  to do:    d"


def test_an_error_that_is_defined_elsewhere_keeps_its_four_parts(private: Private) -> None:
    class OtherError(JaxmlError):
        pass

    private.write_failure(OtherError("a", expected="b", got="c", todo="d"))
    failure = private.failure()
    assert type(failure) is JaxmlError and failure.faults[0].failed == "a"
