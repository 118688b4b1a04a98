"""SIGTERM and SIGINT as a flag that the run polls at safe points; a second signal stops at once.

Reads no other jaxml file; `recipes.train` asks `poll`. A scheduler that sees exit code 75 (EX_TEMPFAIL of
sysexits.h) starts the job again, and `jaxml resume` goes on from the checkpoint that was saved on the way out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType

REQUEUE_EXIT_CODE = 75
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """A context in which the first signal only sets a flag.

    The handler is Python code, so it runs as soon as the interpreter is back from a compile or a save; nothing is lost
    there, because the flag is polled afterwards. Outside the main thread, where Python allows no handlers, it is inert.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def poll(self) -> bool:
        """Whether a signal asked to stop."""
        return self.received is not None

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is not None:
            _say(f"jaxml: second signal ({name}): stopping at once, without a save\n")
            os._exit(128 + number)
        self.received = signal.Signals(number)
        _say(f"jaxml: {name}: saving at the next safe point (a second signal stops at once)\n")


def _say(text: str) -> None:
    """To stderr, past Python's buffers, which a handler must not touch. The reader of a pipe may be gone already."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
