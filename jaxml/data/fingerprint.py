"""What prepared data depends on: the fields that matter, the tokenizer, the names, sizes and contents of the inputs.

Reads `data.spec` and `data.files`; `data.prepare` and `data.prepared` compare with it. Where a file lies does not
matter, nor the weights of the mix, the prefetch or the prepared directory: they change no prepared byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxml.config.spec import canonical_json, to_json
from jaxml.data.files import FileRef, InputFile, list_files, record_file
from jaxml.data.spec import DataSpec
from jaxml.errors import DataError
from jaxml.inputs.spec import HuggingFaceTokenizerSpec


@dataclass(frozen=True)
class Inputs:
    """The input files of each source, by its place in the mix, and the tokenizer's file (none: the tuple is empty)."""

    sources: tuple[tuple[InputFile, ...], ...]
    tokenizer: tuple[InputFile, ...] = ()

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Inputs:
        sources = tuple(tuple(InputFile(**file) for file in files) for files in value["sources"])
        return cls(sources, tuple(InputFile(**file) for file in value["tokenizer"]))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def list_inputs(spec: DataSpec) -> tuple[list[list[FileRef]], list[FileRef]]:
    """The files of each source and of the tokenizer. Raises DataError for a path that names none."""
    sources = [list_files(source.path, f"data.sources.{i}.path") for i, source in enumerate(spec.sources)]
    if isinstance(spec.tokenizer, HuggingFaceTokenizerSpec):
        return sources, list_files(spec.tokenizer.path, "data.tokenizer.path")
    return sources, []


def record_inputs(
    sources: list[list[FileRef]],
    tokenizer: list[FileRef],
    known: Inputs | None = None,
    on_file: Callable[[str], None] | None = None,
) -> Inputs:
    """Sizes and hashes of all input files; those known from before and unchanged are not read again."""
    every = () if known is None else (*known.sources, known.tokenizer)
    before = {file.name: file for files in every for file in files}
    return Inputs(
        tuple(_record(files, before, on_file) for files in sources),
        _record(tokenizer, before, on_file),
    )


def _record(
    files: list[FileRef], before: dict[str, InputFile], on_file: Callable[[str], None] | None
) -> tuple[InputFile, ...]:
    found = []
    for file in files:
        if on_file is not None:
            on_file(file.name)
        found.append(record_file(file, before.get(file.name)))
    return tuple(found)


def current_inputs(spec: DataSpec, recorded_spec: DataSpec, recorded: Inputs) -> tuple[Inputs, list[str]]:
    """The inputs as they are now, and notes on those that cannot be reached.

    Prepared data may be used where the raw inputs are not: a path that is as it was recorded and names nothing here
    counts as unchanged, with a note. Raises DataError for another path that names nothing.
    """
    notes: list[str] = []
    sources = []
    for index, source in enumerate(spec.sources):
        is_known = index < len(recorded.sources)
        known = recorded.sources[index] if is_known else ()
        is_same = is_known and source.path == recorded_spec.sources[index].path
        sources.append(_current(source.path, f"data.sources.{index}.path", known, is_same, notes))
    tokenizer: tuple[InputFile, ...] = ()
    if isinstance(spec.tokenizer, HuggingFaceTokenizerSpec):
        is_same = spec.tokenizer == recorded_spec.tokenizer
        tokenizer = _current(spec.tokenizer.path, "data.tokenizer.path", recorded.tokenizer, is_same, notes)
    return Inputs(tuple(sources), tokenizer), notes


def _current(
    path: str | tuple[str, ...], field: str, known: tuple[InputFile, ...], is_same_path: bool, notes: list[str]
) -> tuple[InputFile, ...]:
    try:
        files = list_files(path, field)
    except DataError:
        if not is_same_path:
            raise
        notes.append(f"{field} {path!r} cannot be reached: not checked for changes")
        return known
    return _record(files, {file.name: file for file in known}, None)


def what_matters(spec: DataSpec, labels: tuple[str, ...], inputs: Inputs) -> dict[str, Any]:
    """Everything that decides the prepared bytes, as a flat dictionary: name to JSON value."""
    matters: dict[str, Any] = {
        name: getattr(spec, name)
        for name in ("sequence_length", "packing", "held_out", "too_long", "shard_tokens", "seed")
    }
    matters["labels"] = list(labels)
    matters["sources"] = len(spec.sources)
    for index, source in enumerate(spec.sources):
        for field, value in to_json(source).items():
            if field not in ("path", "name", "weight"):
                matters[f"sources.{index}.{field}"] = value
        matters[f"input files of sources.{index}"] = [list(file.identity) for file in inputs.sources[index]]
    matters |= {f"tokenizer.{field}": value for field, value in to_json(spec.tokenizer).items() if field != "path"}
    matters["tokenizer file"] = [list(file.identity)[1:] for file in inputs.tokenizer]
    return matters


def source_fingerprint(spec: DataSpec, labels: tuple[str, ...], inputs: Inputs) -> str:
    """sha256 (hex) of what matters, before a tokenizer is trained."""
    return hashlib.sha256(canonical_json(what_matters(spec, labels, inputs)).encode()).hexdigest()


def data_fingerprint(source: str, tokenizer: str) -> str:
    """sha256 (hex) of the source fingerprint and the tokenizer's."""
    return hashlib.sha256(f"{source}:{tokenizer}".encode()).hexdigest()


def changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The entries of two `what_matters` that differ, in words."""
    words = []
    for name in [*before, *(name for name in now if name not in before)]:
        old, new = before.get(name), now.get(name)
        if old != new and "file" in name:
            changed = [file[0] for file in new or [] if file not in (old or [])]
            gone = [file[0] for file in old or [] if file not in (new or [])]
            listed = ", ".join(str(file) for file in dict.fromkeys(changed + gone))
            words.append(f"{name} changed ({listed[:200]})")
        elif old != new:
            words.append(f"{name} was {old!r}, is {new!r}")
    return "; ".join(words) or "the format of the fingerprint"
