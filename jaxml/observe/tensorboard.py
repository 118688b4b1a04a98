"""Scalars for TensorBoard, through tensorboardX (extra `track`).

Reads `errors`; the recipe writes it beside `metrics.jsonl`. It uses tensorboardX's event writer, not its SummaryWriter:
that one hands events to a thread through a process queue, so that a flush does not flush what is still queued.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxml.errors import require_extra

FLUSH_EVERY_S = 10.0


class TensorBoardLog:
    """An event file in `directory`. A run that goes on after `last_step` makes TensorBoard drop the later points that
    earlier event files hold, so curves neither fork nor repeat. Raises MissingExtraError without tensorboardX."""

    def __init__(self, directory: str | os.PathLike[str], last_step: int = 0):
        writer = require_extra("tensorboardX.event_file_writer", "track")
        self._event = require_extra("tensorboardX.proto.event_pb2", "track")
        self._summary = require_extra("tensorboardX.proto.summary_pb2", "track")
        Path(directory).mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names, which tensorboardX gives a resolution of one second.
        self._writer = writer.EventsWriter(str(Path(directory) / "events"), f".{time.time_ns()}")
        self._flushed = time.monotonic()
        if last_step:
            self.truncate(last_step)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One point in the curve of every finite number; a flush every `FLUSH_EVERY_S` seconds."""
        value = self._summary.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in _scalars(metrics)]
        self._put(step=step, summary=self._summary.Summary(value=values))
        if time.monotonic() - self._flushed > FLUSH_EVERY_S:
            self.flush()

    def truncate(self, last_step: int) -> None:
        """The run goes on after `last_step`: whatever was written about later steps is void."""
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._put(step=last_step + 1, session_log=start)

    def flush(self) -> None:
        """Force what was written to the disk; call it when a checkpoint is saved: then a resumed curve has no hole."""
        self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, **fields: Any) -> None:
        self._writer.write_event(self._event.Event(wall_time=time.time(), **fields))


def _scalars(metrics: Mapping[str, Any]) -> list[tuple[str, float]]:
    found = []
    for name, value in metrics.items():
        value = value.item() if hasattr(value, "item") else value
        if isinstance(value, int | float) and math.isfinite(value):
            found.append((name, float(value)))
    return found
