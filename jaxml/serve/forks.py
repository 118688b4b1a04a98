"""How the main process keeps its children: forks die with it, and no helper process of multiprocessing outlives it.

Reads no other jaxml file; `lifecycle` serves inside of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PR_SET_PDEATHSIG = 1

_main_pid: int | None = None


@contextlib.contextmanager
def forks_are_ours() -> Iterator[None]:
    """Inside, forks of this process (LitServe's manager and API servers) die with it and are not reached by Ctrl-C."""
    global _main_pid
    _main_pid = os.getpid()
    try:
        yield
    finally:
        _main_pid = None


@contextlib.contextmanager
def without_resource_tracker() -> Iterator[None]:
    """multiprocessing's helper process, which comes with the first spawned one and leaves some time after the last: if it
    was not there before, it is gone afterwards."""
    tracker: Any = resource_tracker._resource_tracker  # private; the same in Python 3.11 to 3.13
    was_running = tracker._fd is not None
    try:
        yield
    finally:
        if not was_running and tracker._fd is not None:
            tracker._stop()


def _in_forked_child() -> None:
    if _main_pid is None:
        return
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.setpgid(0, 0)
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != _main_pid:
            os._exit(1)


# Elsewhere than on Linux a killed main process leaves its API servers and LitServe's manager.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
os.register_at_fork(after_in_child=_in_forked_child)
