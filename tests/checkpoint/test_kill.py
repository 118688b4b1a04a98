"""A kill at every file operation of a save leaves the previous checkpoint, or the new one, whole and newest."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from jaxml import trees
from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.checkpoint.store import CheckpointStore
from jaxml.errors import CheckpointError
from tests.checkpoint.tiny import abstract, manifest_of, parts_of

SPEC = CheckpointSpec(keep_last=1, keep_best=1, best_metric="loss")


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


def save(directory: Path, step: int) -> None:
    with CheckpointStore(directory, SPEC) as store:
        store.save(step, parts_of(step), manifest_of(step, parts_of(step), metrics={"loss": 1.0 / step}))
        store.wait()


def holds(directory: Path, step: int) -> bool:
    with CheckpointStore(directory, SPEC) as store:
        return trees.compare(parts_of(step), store.restore(step, abstract(parts_of(step)))) == []


def test_a_kill_at_every_file_operation_of_a_save_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path / "before", 1)
    shutil.copytree(tmp_path / "before", tmp_path / "counted")
    KILLER.start(tmp_path, at=-1)
    save(tmp_path / "counted", 2)
    operations = KILLER.stop()
    assert operations > 20
    outcomes = []
    for at in range(operations):
        run = tmp_path / f"killed_{at}"
        shutil.copytree(tmp_path / "before", run)
        KILLER.start(run, at)
        with pytest.raises(CheckpointError, match="Killed"):
            save(run, 2)
        KILLER.stop()
        with CheckpointStore(run, SPEC) as store:
            latest = store.latest_step()
            assert not store.damaged()
        assert latest in (1, 2)
        assert holds(run, latest)
        outcomes.append(latest)
        save(run, 2)
        save(run, 3)
        assert holds(run, 3)
        assert sorted(os.listdir(run)) == ["3"]
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, 2}
    print(outcomes)
