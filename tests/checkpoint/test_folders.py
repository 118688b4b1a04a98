"""What is not a complete checkpoint is refused with what is wrong; paths of all kinds lead to the right step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxml.checkpoint.folders import (
    complete_steps,
    damage,
    examine,
    find_checkpoint,
    read_manifest,
    resolve,
    set_aside,
    step_folders,
)
from jaxml.errors import CheckpointError

FORMAT_1 = Path(__file__).parent / "format_1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with one complete checkpoint, of step 3."""
    shutil.copytree(FORMAT_1 / "3", tmp_path / "run" / "checkpoints" / "3")
    return tmp_path / "run"


def test_run_checkpoints_and_step_directories_lead_to_the_same_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = (str(run / "checkpoints"), 3)
    monkeypatch.chdir(run.parent)
    for path in (run, run / "checkpoints", run / "checkpoints" / "3", "run", f"{run}/checkpoints/3/"):
        assert find_checkpoint(path) == expected
    assert str(resolve("gs://bucket/run")) == "gs://bucket/run"


def test_the_newest_complete_checkpoint_is_found_past_unfinished_and_damaged_ones(run: Path) -> None:
    (run / "checkpoints" / "7").mkdir()
    shutil.copytree(run / "checkpoints" / "3", run / "checkpoints" / "9.orbax-checkpoint-tmp")
    assert step_folders(resolve(run / "checkpoints")) == [3, 7]
    assert find_checkpoint(run)[1] == 3


def empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def no_manifest(step: Path) -> None:
    shutil.rmtree(step / "manifest")


def truncated_manifest(step: Path) -> None:
    file = step / "manifest" / "metadata"
    file.write_text(file.read_text()[:100])


def edited_manifest(step: Path) -> None:
    file = step / "manifest" / "metadata"
    file.write_text(file.read_text().replace('"seed": 7', '"seed": 8'))


def newer_format(step: Path) -> None:
    file = step / "manifest" / "metadata"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))


def foreign_json(step: Path) -> None:
    (step / "manifest" / "metadata").write_text('{"tree": 1}')


def no_answer(step: Path) -> None:
    """What a disk that fails gives: an OSError, though the file is there."""
    (step / "manifest" / "metadata").unlink()
    (step / "manifest" / "metadata").mkdir()


def no_arrays(step: Path) -> None:
    shutil.rmtree(step / "params")


def emptied_index(step: Path) -> None:
    (step / "opt_state" / "manifest.ocdbt").write_bytes(b"")


@pytest.mark.parametrize(
    ("break_it", "kind", "says"),
    [
        (shutil.rmtree, "damaged", "an empty directory"),
        (empty, "damaged", "an empty folder"),
        (no_manifest, "damaged", "no manifest, only"),
        (truncated_manifest, "damaged", "JSONDecodeError"),
        (edited_manifest, "unreadable", "seal of manifest"),
        (newer_format, "unreadable", "expected: one of 1\n  got:      99"),
        (foreign_json, "unreadable", "a JSON object with a format number"),
        (no_answer, "unreadable", "IsADirectoryError"),
        (no_arrays, "damaged", "a file params/_METADATA"),
        (emptied_index, "damaged", "a file opt_state/manifest.ocdbt"),
    ],
)
def test_each_kind_of_damage_is_named_and_says_what_to_do(
    run: Path, break_it: Callable[[Path], None], kind: str, says: str
) -> None:
    break_it(run / "checkpoints" / "3")
    assert examine(resolve(run / "checkpoints"), 3).kind == kind
    for call in (lambda: find_checkpoint(run), lambda: read_manifest(resolve(run / "checkpoints"), 3)):
        with pytest.raises(CheckpointError, match="to do: ") as caught:
            call()
    assert says in str(caught.value) or break_it is shutil.rmtree
    with pytest.raises(CheckpointError, match="checkpoint"):
        find_checkpoint(run / "checkpoints" / "3")


def test_a_folder_under_another_steps_name_is_refused(run: Path) -> None:
    (run / "checkpoints" / "3").rename(run / "checkpoints" / "4")
    (fault,) = damage(resolve(run / "checkpoints"), 4)
    assert fault.got == "one of 3"
    assert examine(resolve(run / "checkpoints"), 4).kind == "unreadable"
    (fault,) = damage(resolve(run / "checkpoints"), 3)
    assert (fault.got, fault.todo) == ("nothing there", "take a step that is there: 4")


def test_what_the_file_system_refuses_to_show_is_not_taken_for_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = resolve(run / "checkpoints")
    for refused in ("checkpoints", "3", "_METADATA"):

        def fail(call: Callable[..., Any], refused: str = refused) -> Callable[..., Any]:
            def refuse(path: Any, *rest: Any, **named: Any) -> Any:
                if Path(path).name == refused:
                    raise PermissionError(13, "Permission denied", str(path))
                return call(path, *rest, **named)

            return refuse

        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", fail(os.listdir))
            patch.setattr(os, "stat", fail(os.stat))
            with pytest.raises(CheckpointError, match=r"PermissionError(.|\n)*may be whole"):
                complete_steps(checkpoints)
    assert complete_steps(checkpoints) == [3]


def test_a_complete_checkpoint_is_never_set_aside_and_no_name_is_taken_twice(run: Path) -> None:
    checkpoints = run / "checkpoints"
    set_aside(resolve(checkpoints), 3)
    assert complete_steps(resolve(checkpoints)) == [3]
    for _ in range(3):
        (checkpoints / "4").mkdir()
        set_aside(resolve(checkpoints), 4)
    newer_format(checkpoints / "3")
    set_aside(resolve(checkpoints), 3)
    names = sorted(entry.name for entry in checkpoints.iterdir())
    assert names == ["damaged-4", "damaged-4.2", "damaged-4.3", "unreadable-3"]
    assert step_folders(resolve(checkpoints)) == []


def test_a_directory_without_checkpoints_says_what_is_there_instead(tmp_path: Path) -> None:
    for name, says in (("absent", "nothing there"), ("file", "a file"), ("empty", "an empty directory")):
        if name == "file":
            (tmp_path / name).write_text("x")
        elif name == "empty":
            (tmp_path / name).mkdir()
        with pytest.raises(CheckpointError, match=says):
            find_checkpoint(tmp_path / name)
    (tmp_path / "empty" / "model.safetensors").write_text("x")
    with pytest.raises(CheckpointError, match=r"other things: model\.safetensors"):
        find_checkpoint(tmp_path / "empty")
    (tmp_path / "empty" / "5.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(CheckpointError, match="only unfinished saves"):
        find_checkpoint(tmp_path / "empty")
