"""A kill at every file operation of a save leaves the previous checkpoint, or the new one, whole and newest.

Python announces its file operations to audit hooks before it does them, in every thread; one that raises is not done.
TensorStore's own writes, in C++, are not announced: random kills of a whole process are for `nox -s chaos`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxml import trees
from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.checkpoint.store import CheckpointStore
from jaxml.errors import CheckpointError
from tests.checkpoint.tiny import abstract, manifest_of

SPEC = CheckpointSpec(keep_last=1)  # So that the kills fall on the removal of the old checkpoint too.


class Killed(BaseException):
    """What a killed process does from here on: nothing."""


class Killer:
    """Counts the Python-level file operations under `root`; from number `at` on, every one of them raises Killed."""

    def __init__(self) -> None:
        self.root, self.at, self.count = "", -1, 0
        sys.addaudithook(self.hook)

    def start(self, root: Path, at: int) -> None:
        self.root, self.at, self.count = str(root), at, 0

    def stop(self) -> int:
        self.root = ""
        return self.count

    def hook(self, event: str, args: tuple) -> None:
        if not self.root or event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"):
            return
        path = args[0] if isinstance(args[0], str) else os.fsdecode(args[0]) if isinstance(args[0], bytes) else ""
        in_open_folder = event in ("os.remove", "os.rmdir") and args[1] != -1  # How shutil.rmtree walks.
        if not (path.startswith(self.root) or in_open_folder):
            return
        if event == "open" and not (args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        self.count += 1
        if self.at >= 0 and self.count > self.at:
            raise Killed


KILLER = Killer()


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a hundred saves that sync to a disk take long."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else tmp_path))
    yield folder
    shutil.rmtree(folder)


def parts_of(step: int) -> dict[str, Any]:
    return {"params": {"w": np.full((3, 2), step, np.float32)}}


def save(directory: Path, step: int) -> None:
    with CheckpointStore(directory, SPEC) as store:
        store.save(step, parts_of(step), manifest_of(step, parts_of(step)))


def holds(directory: Path, step: int) -> bool:
    with CheckpointStore(directory, SPEC) as store:
        return trees.compare(parts_of(step), store.restore(step, abstract(parts_of(step)))) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # Orbax's threads are killed too.
def test_a_kill_at_every_file_operation_of_a_save_loses_nothing(fast_path: Path) -> None:
    save(fast_path / "before", 1)
    shutil.copytree(fast_path / "before", fast_path / "counted")
    KILLER.start(fast_path, at=-1)
    save(fast_path / "counted", 2)
    operations = KILLER.stop()
    assert operations > 20
    outcomes = []
    for at in range(operations):
        run = fast_path / f"killed_{at}"
        shutil.copytree(fast_path / "before", run)
        KILLER.start(run, at)
        with pytest.raises(CheckpointError, match="Killed"):
            save(run, 2)
        KILLER.stop()
        with CheckpointStore(run, SPEC) as store:
            outcomes.append(store.latest_step())
            assert not store.damaged()
        assert outcomes[-1] in (1, 2)
        assert holds(run, outcomes[-1])
        again = 2 if outcomes[-1] == 1 else 3
        save(run, again)
        assert holds(run, again)
        assert os.listdir(run) == [str(again)], f"killed at file operation {at}"
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, 2}
