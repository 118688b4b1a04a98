"""Input files wherever fsspec reaches: listing, opening, hashing, and writing a file whole or not at all.

Reads `errors`; `data.sources` reads documents through it, `data.fingerprint` records inputs with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from jaxml.errors import DataError


@dataclass(frozen=True)
class FileRef:
    """A file of a source. `name` is how messages call it."""

    system: Any
    path: str
    name: str

    @contextlib.contextmanager
    def open(self, compression: str | None = "infer") -> Iterator[BinaryIO]:
        """The file for reading bytes, decompressed by its suffix. Raises DataError when it cannot be opened or read."""
        try:
            with self.system.open(self.path, "rb", compression=compression) as file:
                yield file
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                self.name, expected="a file that can be read", got=str(error), todo="correct the path or its rights"
            ) from error

    def change_key(self) -> str:
        """A cheap text that changes when the file does (sizes and times as the file system tells them)."""
        return str(self.system.ukey(self.path))


@dataclass(frozen=True)
class InputFile:
    """What is recorded of a file: enough to know later, cheaply first, that it is still the same."""

    name: str
    size: int
    sha256: str
    key: str

    @property
    def identity(self) -> tuple[str, int, str]:
        """What the fingerprint covers: the last part of the name, the size and the content."""
        return self.name.rsplit("/", 1)[-1], self.size, self.sha256


def list_files(path: str | tuple[str, ...], field: str) -> list[FileRef]:
    """The files that the `path` of a source names, a glob's in sorted order. `field` is its name in messages.

    Raises DataError: nothing there, a directory, a file system that is not known or not installed.
    """
    found: list[FileRef] = []
    for pattern in (path,) if isinstance(path, str) else path:
        try:
            system, stripped = fsspec.core.url_to_fs(pattern)
            is_glob = any(character in stripped for character in "*?[") and not system.exists(stripped)
            matches = sorted(system.glob(stripped, detail=True).items()) if is_glob else [(stripped, None)]
            files = [match for match, info in matches if (info or system.info(match))["type"] == "file"]
        except (OSError, ValueError, ImportError) as error:
            raise _unusable(field, pattern, str(error) or type(error).__name__) from error
        if not files:
            raise _unusable(field, pattern, "no file matches" if is_glob else "a directory, not a file")
        found += [FileRef(system, match, _name(pattern, system, match)) for match in files]
    return found


def record_file(file: FileRef, known: InputFile | None = None) -> InputFile:
    """Size and hash of a file. One that was recorded before and has not changed its key is not read again."""
    key = file.change_key()
    if known is not None and known.key == key:
        return known
    with file.open(compression=None) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
        size = stream.seek(0, os.SEEK_END)
    return InputFile(file.name, size, digest, key)


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file so that it is there whole, on disk, or not at all. Several processes may do it at once."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        put_in_place(temporary, file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def put_in_place(temporary: Path, file: Path) -> None:
    """Give a finished, synced temporary file its name, and make the name durable."""
    os.replace(temporary, file)
    descriptor = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(file: Path) -> str:
    """sha256 (hex) of a local file, read in pieces."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unusable(field: str, pattern: str, got: str) -> DataError:
    return DataError(
        field,
        expected="a file, a glob that matches files, or an fsspec URL whose file system is installed",
        got=f"{pattern!r}: {got}",
        todo="correct the path; for a directory give DIR/*.txt; for s3:// or gs:// install s3fs or gcsfs",
    )


def _name(pattern: str, system: Any, path: str) -> str:
    if "://" in pattern:
        return str(system.unstrip_protocol(path))
    return path if os.path.isabs(pattern) else os.path.relpath(path)
