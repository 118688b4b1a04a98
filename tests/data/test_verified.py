"""A changed byte is found at opening, and files that were not touched since they were found whole are not read again."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from jaxml.data import verified
from jaxml.data.layout import VERIFIED_FILE
from jaxml.data.prepared import Prepared, open_prepared
from jaxml.data.tokenise import Progress
from jaxml.errors import DataError


@pytest.fixture
def copied(mixed: Prepared, tmp_path: Path) -> Prepared:
    """A copy of the mixed corpus, verified, that a test may damage."""
    shutil.copytree(mixed.directory, tmp_path / "prepared")
    return open_prepared(dataclasses.replace(mixed.spec, prepared=str(tmp_path / "prepared")))


def files(prepared: Prepared) -> list[str]:
    return sorted(file.name for file in prepared.directory.iterdir() if file.suffix in (".bin", ".npy"))


def files_read(prepared: Prepared) -> list[str]:
    """The files that opening reads."""
    reports: list[Progress] = []
    open_prepared(prepared.spec, progress=reports.append)
    assert {report.stage for report in reports} <= {"verify"}
    return sorted(report.name for report in reports)


def test_a_changed_byte_in_any_file_is_found_at_opening(copied: Prepared) -> None:
    for name in files(copied):
        file = copied.directory / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        for _ in range(2):
            with pytest.raises(DataError, match=f"{name}\n  expected: the content that was written(.|\n)*force"):
                open_prepared(copied.spec)
        file.write_bytes(content)
        open_prepared(copied.spec)


def test_what_was_found_whole_is_read_again_only_when_touched_or_copied(copied: Prepared, tmp_path: Path) -> None:
    assert files_read(copied) == []
    os.utime(copied.directory / "documents.npy", (1, 1))
    assert files_read(copied) == ["documents.npy"]
    assert files_read(copied) == []
    shutil.copytree(copied.directory, tmp_path / "again")
    moved = open_prepared(dataclasses.replace(copied.spec, prepared=str(tmp_path / "again")), progress=lambda _: None)
    (moved.directory / VERIFIED_FILE).unlink()
    assert files_read(moved) == files(moved)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 99, "files": {}}', '{"format": 1, "files": {"x": 1}}'])
def test_a_record_that_is_damaged_or_of_another_format_is_made_anew(copied: Prepared, content: str) -> None:
    before = json.loads((copied.directory / VERIFIED_FILE).read_text())
    (copied.directory / VERIFIED_FILE).write_text(content)
    assert files_read(copied) == files(copied)
    assert json.loads((copied.directory / VERIFIED_FILE).read_text()) == before


def test_a_record_of_other_content_is_not_trusted(copied: Prepared) -> None:
    record = json.loads((copied.directory / VERIFIED_FILE).read_text())
    record["files"]["documents.npy"][-1] = "0" * 64
    (copied.directory / VERIFIED_FILE).write_text(json.dumps(record))
    assert files_read(copied) == ["documents.npy"]


def test_a_place_that_cannot_be_written_is_verified_each_time(
    copied: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied.directory / VERIFIED_FILE).unlink()

    def refuse(file: Path, content: bytes) -> None:
        raise OSError(30, "Read-only file system", str(file))

    monkeypatch.setattr(verified, "write_atomically", refuse)
    assert files_read(copied) == files_read(copied) == files(copied)


def test_what_progress_raises_ends_the_reading(copied: Prepared) -> None:
    (copied.directory / VERIFIED_FILE).unlink()

    def leave(progress: Progress) -> None:
        raise KeyboardInterrupt(progress.name)

    with pytest.raises(KeyboardInterrupt):
        open_prepared(copied.spec, progress=leave)
