"""A line of JSON for each request that ended: ids, counts, durations and codes, never prompts, answers or keys.

Reads no other jaxml file; `serve.metrics` fills the lines, `serve.launch` says where they go.

A thread writes them, so that a full disk or a reader that has stopped holds up no answer: lines wait in a bounded queue, and
what does not fit into it is dropped and counted. It starts with the first line, hence after the fork of the API process.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import queue
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MAX_WAITING_LINES = 1024
MAX_TEXT_CHARACTERS = 128
MAX_FILE_BYTES, NUM_OLD_FILES = 64 * 2**20, 3
CLOSE_S = 2.0


class RequestLog:
    """Writes lines to `handler`, which a thread of its own calls. `num_dropped`: lines that were lost."""

    def __init__(self, handler: logging.Handler):
        self._handler = handler
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING_LINES)
        self._thread: threading.Thread | None = None
        self.num_dropped = 0

    @classmethod
    def to_stderr(cls) -> RequestLog:
        """To standard error, where the server's other messages go."""
        return cls(logging.StreamHandler(sys.stderr))

    @classmethod
    def to_file(cls, path: Path, max_bytes: int = MAX_FILE_BYTES) -> RequestLog:
        """To a file that only its owner reads; at `max_bytes` it becomes PATH.1, and so on up to three old ones."""
        path.touch(mode=0o600)
        return cls(
            logging.handlers.RotatingFileHandler(path, maxBytes=max_bytes, backupCount=NUM_OLD_FILES, delay=True)
        )

    def write(self, fields: Mapping[str, Any]) -> None:
        """Queue a line. Never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="request log", daemon=True)
            self._thread.start()
        try:
            self._lines.put_nowait(line_of(fields))
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what waits, for at most two seconds."""
        if self._thread is not None:
            try:
                self._lines.put(None, timeout=CLOSE_S)
            except queue.Full:
                return
            self._thread.join(CLOSE_S)
            self._handler.close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            record = logging.LogRecord("jaxml.requests", logging.INFO, "", 0, line, None, None)
            self._handler.handle(record)


def line_of(fields: Mapping[str, Any]) -> str:
    """One line of ASCII: JSON escapes control characters and all else; long texts are cut, numbers rounded.

    >>> line_of({"tenant": "a\\nb", "duration_s": 0.12345678}).partition(", ")[2]
    '"tenant": "a\\\\nb", "duration_s": 0.123457}'
    """
    time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"time": time, **{name: _bounded(value) for name, value in fields.items()}}, allow_nan=False)


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return value[:MAX_TEXT_CHARACTERS]
    return round(value, 6) if isinstance(value, float) else value
