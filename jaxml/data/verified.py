"""Whether the files of a prepared directory hold what was written, read once for as long as they are not touched.

Reads `data.layout` and `data.files`; `data.prepared` calls `verify` at every opening. What was found whole is remembered
in `verified.json` beside the files, by size, time and inode: reading again finds nothing new as long as those stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxml.config.spec import canonical_json
from jaxml.data.files import sha256_of, write_atomically
from jaxml.data.layout import VERIFIED_FILE, FileRecord
from jaxml.errors import DataError, Faults

FORMAT = 1

# Size in bytes, time of the last change in ns, inode, and the sha256 that the content had.
Seen = tuple[int, int, int, str]


def verify(folder: Path, files: Sequence[FileRecord], reading: Callable[[str], None] = lambda _: None) -> None:
    """Compare size and sha256 of the files with their records; `reading` is called with the name of each that is read.

    Raises DataError that names every file which is missing, of another size, or of other bytes. A directory that cannot
    be written is verified at every opening.
    """
    known = _remembered(folder)
    whole: dict[str, Seen] = {}
    faults = Faults(DataError)
    for file in files:
        path = folder / file.file
        try:
            info = path.stat()
            seen = (info.st_size, info.st_mtime_ns, info.st_ino, file.sha256)
            if info.st_size != file.num_bytes:
                _add(faults, path, f"{file.num_bytes} bytes", f"{info.st_size} bytes")
            elif known.get(file.file) != seen:
                reading(file.file)
                digest = sha256_of(path)
                if digest != file.sha256:
                    _add(faults, path, f"the content that was written ({file.sha256[:12]})", f"other: {digest[:12]}")
        except FileNotFoundError:
            _add(faults, path, f"{file.num_bytes} bytes", "no such file")
        except OSError as error:
            _add(faults, path, "a file that can be read", f"{type(error).__name__}: {error}")
        else:
            whole[file.file] = seen
    faults.raise_if_any()
    if whole != known:
        _remember(folder, whole)


def _add(faults: Faults, file: Path, expected: str, got: str) -> None:
    faults.add(str(file), expected=expected, got=got, todo="prepare the data again with force")


def _remembered(folder: Path) -> dict[str, Seen]:
    """What was verified before; nothing where the record is missing or not as `_remember` writes it."""
    try:
        value = json.loads((folder / VERIFIED_FILE).read_bytes())
        if value["format"] != FORMAT:
            return {}
        return {name: (size, time, inode, sha256) for name, (size, time, inode, sha256) in value["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _remember(folder: Path, whole: dict[str, Seen]) -> None:
    try:
        write_atomically(folder / VERIFIED_FILE, canonical_json({"format": FORMAT, "files": whole}).encode())
    except OSError:  # A full disk, a read-only mount: it is verified again the next time.
        return
