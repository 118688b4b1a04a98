"""One writer at a time in a prepared directory, over processes: a lock that the system frees on any kind of death.

Reads `data.layout` and `errors`; `data.prepare` holds it while it writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxml.data.layout import DATASET_FILE, LOCK_FILE
from jaxml.errors import DataError

POLL_S = 0.2


@contextlib.contextmanager
def only_writer(folder: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of `folder`, which is made where it is missing, for the `with` block.

    While another holds it, `waiting` is called every `POLL_S` seconds with who that is; what it raises ends the wait.
    Finished data in a place that cannot be written needs no lock. Raises DataError where files cannot be locked.
    """
    descriptor = _open(folder)
    if descriptor is None:
        yield
        return
    try:
        while not _try_to_lock(folder, descriptor):
            waiting(f"process {os.pread(descriptor, 20, 0).decode(errors='replace') or 'unknown'}")
            time.sleep(POLL_S)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        try:
            yield
        finally:
            # The file stays: another process may wait on it. A child that was forked meanwhile shares the descriptor,
            # so that closing it alone would not free the lock.
            os.ftruncate(descriptor, 0)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _open(folder: Path) -> int | None:
    """A descriptor of the lock file; None where finished data cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and (folder / DATASET_FILE).exists():
            return None
        raise _unusable(folder, error) from error


def _try_to_lock(folder: Path, descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _unusable(folder, error) from error
    os.ftruncate(descriptor, 0)
    return True


def _unusable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"locking {folder / LOCK_FILE}",
        expected="a directory that can be written, on a file system with locks (flock)",
        got=f"{type(error).__name__}: {error}",
        todo="mend its rights, or prepare into another directory",
    )
