"""How LitServe's worker process behaves as one of ours: it outlives nobody, and says once what went wrong.

Reads `errors` and `serve.private`; `lifecycle` hands `InWorker` to LitServe, the loops use `reported`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator

from litserve import Callback

from jaxml.errors import JaxmlError
from jaxml.serve.private import Private


class InWorker(Callback):
    """LitServe calls `on_before_setup` in the worker before anything of the LitAPI runs."""

    def __init__(self, private: Private):
        self._private = private

    def on_before_setup(self, *args: object, **kwargs: object) -> None:
        """The main process decides when the worker ends: a signal to all processes must not cut running answers."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        watch = threading.Thread(target=_end_with_parent, args=(self._private,), name="jaxml-parent", daemon=True)
        watch.start()


@contextlib.contextmanager
def reported(private: Private) -> Iterator[None]:
    """What fails inside is written for the main process, and the worker ends. A traceback is printed for what jaxml
    did not raise on purpose."""
    try:
        yield
    except JaxmlError as error:
        private.write_failure(error)
        _end()
    except Exception as error:
        traceback.print_exc()
        got, todo = f"{type(error).__name__}: {error}", "see the traceback above"
        private.write_failure(JaxmlError("the worker process", expected="to start", got=got, todo=todo))
        _end()


def _end_with_parent(private: Private) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # Blocks until the parent is gone, however it went.
        private.remove()
        _end()


def _end() -> None:
    """At once: threads of JAX and of the engine may not come to an end by themselves."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
