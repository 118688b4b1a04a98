"""What lies in a prepared directory: file names, array types, and the JSON records beside the arrays.

Reads `errors`; `data.shards`, `data.prepare` write it and `data.prepared` reads it. `dataset.json` is written last, so
a directory that has it is complete; while `data prepare` runs, `prepare.json` says which shards are finished.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxml.config.spec import canonical_json
from jaxml.data.files import sha256_of, write_atomically
from jaxml.errors import DataError

FORMAT = 1
DATASET_FILE = "dataset.json"
PROGRESS_FILE = "prepare.json"
DOCUMENTS_FILE = "documents.npy"
TOKENIZER_FOLDER = "tokenizer"
VERIFIED_FILE = "verified.json"
LOCK_FILE = "prepare.lock"
SPLITS = ("train", "held_out")

# `position`: where the document begins in the stream of all shards; `file`, `line`: where it came from; `hash`: its
# text's.
DOCUMENT = np.dtype(
    [
        ("position", "<u8"),
        ("length", "<u4"),
        ("source", "<u2"),
        ("split", "u1"),
        ("label", "<i4"),
        ("file", "<u4"),
        ("line", "<u8"),
        ("hash", "<u8"),
    ]
)


@dataclass(frozen=True)
class FileRecord:
    """A finished file: opening the directory checks its size and, once as long as it is not touched, its hash."""

    file: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard. `next_document` is (source, file, number) of the document after its last one."""

    tokens: FileRecord
    documents: FileRecord
    num_tokens: int
    max_id: int
    next_document: tuple[int, int, int]
    dropped: dict[str, int]
    dropped_names: tuple[str, ...]


@dataclass(frozen=True)
class State:
    """The content of `prepare.json` and, with everything filled in, of `dataset.json`."""

    spec: dict[str, Any]
    labels: tuple[str, ...]
    source_fingerprint: str
    inputs: dict[str, Any]
    shards: tuple[ShardRecord, ...] = ()
    fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    vocab_size: int = 0
    files: tuple[FileRecord, ...] = ()
    sources: tuple[dict[str, Any], ...] = ()
    format: int = FORMAT

    def write(self, file: Path) -> None:
        write_atomically(file, canonical_json(dataclasses.asdict(self)).encode())


def read_state(folder: Path) -> tuple[State | None, bool]:
    """The recorded state of a prepared directory (None: there is none) and whether it is complete.

    Raises DataError when the record is damaged or of another format.
    """
    for name in (DATASET_FILE, PROGRESS_FILE):
        if (folder / name).exists():
            return _read(folder / name), name == DATASET_FILE
    return None, False


def record(file: Path) -> FileRecord:
    """Size and hash of a finished file."""
    return FileRecord(file.name, file.stat().st_size, sha256_of(file))


def token_type(vocab_size: int) -> np.dtype:
    """The type of stored ids: two bytes where the vocabulary fits."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def tokens_file(shard: int) -> str:
    return f"tokens-{shard:05d}.bin"


def shard_documents_file(shard: int) -> str:
    return f"documents-{shard:05d}.npy"


def plan_files(split: int, source: int) -> tuple[str, str]:
    """The files of one plan: row borders and segments."""
    stem = f"plan-{SPLITS[split]}-{source}"
    return f"{stem}-rows.npy", f"{stem}-segments.npy"


def is_ours(name: str) -> bool:
    """Whether `data prepare` writes a file of this name (but for its lock, which is never removed)."""
    known = name in (DATASET_FILE, PROGRESS_FILE, DOCUMENTS_FILE, VERIFIED_FILE)
    array = name.startswith(("tokens-", "documents-", "plan-")) and name.endswith((".bin", ".npy"))
    return known or array or (name.startswith(".") and name.endswith(".tmp"))


def _read(file: Path) -> State:
    try:
        value = json.loads(file.read_bytes())
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']}, this jaxml reads {FORMAT}")
        value["labels"] = tuple(value["labels"])
        value["sources"] = tuple(value["sources"])
        value["files"] = tuple(FileRecord(**item) for item in value["files"])
        value["shards"] = tuple(_shard(item) for item in value["shards"])
        return State(**value)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            str(file),
            expected="the record that data prepare wrote",
            got=f"{type(error).__name__}: {error}",
            todo="prepare the data again with force, or name another directory",
        ) from error


def _shard(value: dict[str, Any]) -> ShardRecord:
    value["tokens"] = FileRecord(**value["tokens"])
    value["documents"] = FileRecord(**value["documents"])
    value["next_document"] = tuple(value["next_document"])
    value["dropped_names"] = tuple(value["dropped_names"])
    return ShardRecord(**value)
