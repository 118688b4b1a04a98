"""Which folders hold complete checkpoints, and what is wrong with those that do not. Reads no arrays and no Orbax.

Reads `checkpoint.manifest` and `errors`; `checkpoint.store` and `checkpoint.compare` read it. The names below are those
that Orbax gives its files: a folder a step, in it one a part and one for the manifest.
"""

from __future__ import annotations

import json
import os

from etils import epath

from jaxml.checkpoint.manifest import Manifest, verify
from jaxml.errors import CheckpointError, Fault

MANIFEST = "manifest"
MANIFEST_FILE = "metadata"
ARRAY_FILES = ("_METADATA", "manifest.ocdbt")
# On Google Cloud Storage, which has no rename, Orbax writes in place and marks a complete folder with this file.
COMMIT_FILE = "commit_success.txt"
UNFINISHED = ".orbax-checkpoint-tmp"
RUN_SUBDIRECTORY = "checkpoints"


def resolve(path: str | os.PathLike[str]) -> epath.Path:
    """An absolute path, or a URL as it is."""
    text = os.fspath(path)
    return epath.Path(text if "://" in text else os.path.abspath(os.path.expanduser(text)))


def step_folders(directory: epath.Path) -> list[int]:
    """The steps after which folders of `directory` are named, ascending, complete or not; none where there is none."""
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if _is_step_name(entry.name))


def damage(directory: epath.Path, step: int) -> list[Fault]:
    """Why `directory/step` is not a complete, sealed checkpoint (empty when it is). Data files are not read."""
    folder = directory / str(step)
    earlier = f"remove or move {folder}; resume then takes the newest complete checkpoint"
    if not folder.is_dir():
        kept = ", ".join(map(str, step_folders(directory))) or "none"
        return [Fault(f"checkpoint {folder}", "a folder", "nothing there", f"take a step that is there: {kept}")]
    names = [entry.name for entry in folder.iterdir()]
    if not names:
        return [Fault(f"checkpoint {folder}", "a manifest and arrays", "an empty folder", earlier)]
    if str(folder).startswith("gs://") and COMMIT_FILE not in names:
        return [Fault(f"checkpoint {folder}", f"the mark {COMMIT_FILE}", "an unfinished save", earlier)]
    try:
        value = json.loads((folder / MANIFEST / MANIFEST_FILE).read_text())
    except FileNotFoundError:
        got = f"no manifest, only {', '.join(sorted(names)[:5])}"
        todo = f"if jaxml wrote it, {earlier}; another program's checkpoint cannot be opened here"
        return [Fault(f"checkpoint {folder}", "a sealed manifest", got, todo)]
    except (OSError, ValueError) as error:
        return [Fault(f"manifest of {folder}", "JSON", f"{type(error).__name__}: {error}", earlier)]
    faults = verify(value, f"manifest of {folder}")
    if faults:
        return faults
    if value["step"] != step:
        return [Fault(f"checkpoint {folder}", f"a checkpoint of step {step}", f"one of {value['step']}", earlier)]
    missing = [
        f"{part}/{name}"
        for part, leaves in value["leaves"].items()
        for name in ARRAY_FILES
        if leaves and not _has_content(folder / part / name)
    ]
    return [Fault(f"arrays of {folder}", f"a file {name}", "missing or empty", earlier) for name in missing]


def read_manifest(directory: epath.Path, step: int) -> Manifest:
    """The manifest of a complete checkpoint. Raises CheckpointError that says what is wrong with any other."""
    faults = damage(directory, step)
    if faults:
        raise CheckpointError.from_faults(faults)
    folder = directory / str(step)
    return Manifest.from_json(json.loads((folder / MANIFEST / MANIFEST_FILE).read_text()), f"manifest of {folder}")


def find_checkpoint(path: str | os.PathLike[str]) -> tuple[str, int]:
    """(store directory, step) for a run or checkpoints directory (its newest complete step) or the folder of a step.

    Raises CheckpointError that says what was found instead.
    """
    found = resolve(path)
    if not found.is_dir():
        got = "a file" if found.exists() else "nothing there"
        todo = "pass a run directory, its checkpoints folder, or the folder of one step"
        raise CheckpointError(f"checkpoint {found}", expected="a directory", got=got, todo=todo)
    if (found / RUN_SUBDIRECTORY).is_dir():
        found = found / RUN_SUBDIRECTORY
    elif _is_step_name(found.name) and not step_folders(found):
        read_manifest(found.parent, int(found.name))
        return str(found.parent), int(found.name)
    wrong = {step: damage(found, step) for step in step_folders(found)}
    complete = [step for step, faults in wrong.items() if not faults]
    if complete:
        return str(found), max(complete)
    faults = [fault for step_faults in wrong.values() for fault in step_faults]
    raise CheckpointError.from_faults(faults or [_nothing_in(found)])


def _nothing_in(directory: epath.Path) -> Fault:
    names = sorted(entry.name for entry in directory.iterdir())
    if any(UNFINISHED in name for name in names):
        todo = "start the run again: none of its saves was complete, so it begins at step 0"
        return Fault(f"checkpoints in {directory}", "a complete checkpoint", "only unfinished saves", todo)
    got = f"other things: {', '.join(names[:5])}" if names else "an empty directory"
    todo = "pass a run directory, its checkpoints folder, or the folder of one step"
    return Fault(f"checkpoints in {directory}", "a folder named after a step", got, todo)


def _is_step_name(name: str) -> bool:
    return name.isascii() and name.isdigit() and str(int(name)) == name


def _has_content(path: epath.Path) -> bool:
    return path.exists() and path.stat().length > 0
