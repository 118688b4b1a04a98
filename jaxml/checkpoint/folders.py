"""Which folders hold complete checkpoints, and what is wrong with those that do not. Reads no arrays and no Orbax.

Reads `checkpoint.manifest` and `errors`; `checkpoint.store` and `checkpoint.compare` read it. The names below are those
that Orbax gives its files: a folder a step, in it one a part and one for the manifest.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from dataclasses import dataclass
from typing import Any, Literal

from etils import epath

from jaxml.checkpoint.manifest import Manifest, verify
from jaxml.errors import CheckpointError, Fault

MANIFEST = "manifest"
TOKENIZER = "tokenizer"
JSON_FILE = "metadata"
ARRAY_FILES = ("_METADATA", "manifest.ocdbt")
# On Google Cloud Storage, which has no rename, Orbax writes in place and marks a complete folder with this file.
COMMIT_FILE = "commit_success.txt"
TOKENIZER_NAME = re.compile(r"[a-z_]+\.[a-z]+")
UNFINISHED = ".orbax-checkpoint-tmp"
RUN_SUBDIRECTORY = "checkpoints"


def resolve(path: str | os.PathLike[str]) -> epath.Path:
    """An absolute path, or a URL as it is."""
    text = os.fspath(path)
    return epath.Path(text if "://" in text else os.path.abspath(os.path.expanduser(text)))


def step_folders(directory: epath.Path) -> list[int]:
    """The steps after which folders of `directory` are named, ascending, complete or not; none where there is none.

    Raises CheckpointError where the directory is there and cannot be listed: that is not the same as none.
    """
    try:
        names = _names_in(directory) or []
    except OSError as error:
        raise CheckpointError.from_faults([_no_answer(f"checkpoints in {directory}", error)]) from error
    return sorted(int(name) for name in names if _is_step_name(name))


@dataclass(frozen=True)
class Examined:
    """What a folder is, why it is not complete (no faults when it is), and the manifest's JSON of a complete one.

    `damaged`: something is missing, empty or cut off, as kills and full disks leave it; it may be passed over.
    `unfinished`: the same on Google Cloud Storage, where Orbax removes it. `unreadable`: it may well be whole (the file
    system gave an error, a newer jaxml wrote it, the seal is wrong): never removed, nor taken for nothing.
    """

    kind: Literal["complete", "unfinished", "damaged", "unreadable"]
    faults: tuple[Fault, ...] = ()
    manifest: Any = None


def examine(directory: epath.Path, step: int) -> Examined:
    """Whether `directory/step` is a complete, sealed checkpoint. Data files are not read."""
    folder = directory / str(step)
    try:
        return _examine(directory, step)
    except OSError as error:
        return Examined("unreadable", (_no_answer(f"checkpoint {folder}", error),))


def damage(directory: epath.Path, step: int) -> list[Fault]:
    """Why `directory/step` is not a complete, sealed checkpoint (empty when it is). Data files are not read."""
    return list(examine(directory, step).faults)


def complete_steps(directory: epath.Path) -> list[int]:
    """The steps of complete checkpoints, ascending; those that are not complete are passed over.

    Raises CheckpointError where none is complete and one is unreadable: to begin at step 0 would write over it.
    """
    found = {step: examine(directory, step) for step in step_folders(directory)}
    complete = [step for step, examined in found.items() if examined.kind == "complete"]
    unreadable = {step: examined for step, examined in found.items() if examined.kind == "unreadable"}
    if unreadable and not complete:
        steps = ", ".join(map(str, unreadable))
        todo = "mend what is said below and resume; or move the folders away to begin at step 0"
        first = Fault(f"checkpoints in {directory}", "a complete one", f"only unreadable ones, of step {steps}", todo)
        raise CheckpointError.from_faults([first, *(fault for item in unreadable.values() for fault in item.faults)])
    return complete


def set_aside(directory: epath.Path, step: int) -> None:
    """Rename the folder of a step that is not complete to `damaged-STEP` or `unreadable-STEP`: its step is free again.

    An unfinished one is left to Orbax. Raises CheckpointError when it cannot be renamed.
    """
    kind = examine(directory, step).kind
    if kind in ("complete", "unfinished"):
        return
    folder = directory / str(step)
    first = f"{kind}-{step}"
    names = itertools.chain([first], (f"{first}.{number}" for number in itertools.count(2)))
    try:
        folder.rename(next(directory / name for name in names if not (directory / name).exists()))
    except OSError as error:
        raise CheckpointError(
            f"moving {folder}, which is {kind}, out of the way",
            expected="a directory whose entries can be renamed",
            got=f"{type(error).__name__}: {error}",
            todo="mend its rights, or move the folder by hand",
        ) from error


def read_manifest(directory: epath.Path, step: int) -> Manifest:
    """The manifest of a complete checkpoint. Raises CheckpointError that says what is wrong with any other."""
    examined = examine(directory, step)
    if examined.faults:
        raise CheckpointError.from_faults(examined.faults)
    return Manifest.from_json(examined.manifest, f"manifest of {directory / str(step)}")


def read_tokenizer_files(directory: epath.Path, step: int) -> dict[str, bytes]:
    """The tokenizer's files (name to content) in a checkpoint; none in one that was saved without a tokenizer.

    Raises CheckpointError when they cannot be read, or have names that are no plain file names.
    """
    file = directory / str(step) / TOKENIZER / JSON_FILE
    if TOKENIZER not in (_names_in(directory / str(step)) or []):
        return {}
    try:
        files = {name: content.encode() for name, content in json.loads(file.read_text()).items()}
        if not all(TOKENIZER_NAME.fullmatch(name) for name in files):
            raise ValueError(f"file names {sorted(files)}")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"tokenizer of checkpoint {directory / str(step)}",
            expected="a JSON object of plain file names and their texts",
            got=f"{type(error).__name__}: {error}"[:200],
            todo="take another checkpoint: this one was changed or damaged after it was saved",
        ) from error
    return files


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


def _examine(directory: epath.Path, step: int) -> Examined:
    """`examine`, which answers for the OSErrors that this lets through."""
    folder = directory / str(step)
    checkpoint = f"checkpoint {folder}"
    earlier = f"remove or move {folder}; resume then takes the newest complete checkpoint"
    names = _names_in(folder)
    if names is None:
        kept = ", ".join(map(str, step_folders(directory))) or "none"
        todo = f"take a step that is there: {kept}"
        return Examined("damaged", (Fault(checkpoint, "a folder", "nothing there", todo),))
    if not names:
        return Examined("damaged", (Fault(checkpoint, "a manifest and arrays", "an empty folder", earlier),))
    if str(folder).startswith("gs://") and COMMIT_FILE not in names:
        return Examined("unfinished", (Fault(checkpoint, f"the mark {COMMIT_FILE}", "an unfinished save", earlier),))
    try:
        value = json.loads((folder / MANIFEST / JSON_FILE).read_text())
    except FileNotFoundError:
        got = f"no manifest, only {', '.join(sorted(names)[:5])}"
        todo = f"if jaxml wrote it, {earlier}; another program's checkpoint cannot be opened here"
        return Examined("damaged", (Fault(checkpoint, "a sealed manifest", got, todo),))
    except ValueError as error:
        got = f"{type(error).__name__}: {error}"
        return Examined("damaged", (Fault(f"manifest of {folder}", "JSON", got, earlier),))
    faults = verify(value, f"manifest of {folder}")
    if faults:
        return Examined("unreadable", tuple(faults))
    if value["step"] != step:
        todo = f"rename it to {value['step']}, or move it away"
        got = f"one of {value['step']}"
        return Examined("unreadable", (Fault(checkpoint, f"a checkpoint of step {step}", got, todo),))
    missing = [
        f"{part}/{name}"
        for part, leaves in value["leaves"].items()
        for name in ARRAY_FILES
        if leaves and not _has_content(folder / part / name)
    ]
    if missing:
        lost = (Fault(f"arrays of {folder}", f"a file {name}", "missing or empty", earlier) for name in missing)
        return Examined("damaged", tuple(lost))
    return Examined("complete", manifest=value)


def _no_answer(what: str, error: OSError) -> Fault:
    todo = "mend the rights or the file system, then try again: what is there may be whole"
    return Fault(what, "files that can be read", f"{type(error).__name__}: {error}", todo)


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


def _names_in(folder: epath.Path) -> list[str] | None:
    """The names in a folder; None where there is none. Locally `is_dir` would take every OSError for "none"."""
    if _is_remote(folder) and not folder.is_dir():
        return None
    try:
        return [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return None


def _has_content(path: epath.Path) -> bool:
    if _is_remote(path) and not path.exists():
        return False
    try:
        return path.stat().length > 0
    except FileNotFoundError:
        return False


def _is_remote(path: epath.Path) -> bool:
    return "://" in str(path)
