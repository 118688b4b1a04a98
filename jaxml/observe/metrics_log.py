"""`metrics.jsonl`: one JSON object a step, on disk as soon as it is written, and never two of the same step.

Reads `errors`. The recipe writes it; `observe.report`, `observe.summary`, the command line and everything that lists or
compares runs read it. No jax, no NumPy.

A record has `step` first and `loss`; the recipe adds what the step and the loop measured. The names that other files
of this room read: `learning_rate`, `grad_norm`, `num_tokens` (of the step), `tokens_per_s`, `data_wait_s` (seconds that
the step waited for its batch) and `step_s` (the rest of its time), and `eval_loss` on the steps that were evaluated. A
number that is infinite or NaN is written as `null`, and its dotted name is listed under `nonfinite`: every line is JSON
that any reader accepts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxml.errors import RunError

Record = dict[str, Any]


class MetricsLog:
    """The writer. Opening cuts off a line that a kill tore; a step at or before the last one is refused.

    Raises RunError when the file is damaged in the middle, cannot be written, or when a step would be written twice.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._last_step = -1
        self._replace(lambda step: True)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the record of `step`: numbers, array scalars, strings, booleans, None, and lists or dicts of them."""
        if step <= self._last_step:
            raise RunError(
                f"{self.path}: step {step}",
                expected=f"a step after {self._last_step}, the last one in the file",
                got=f"step {step}",
                todo="call truncate(step - 1) first when a run resumes or rewinds",
            )
        remaining = encode(step, metrics)
        try:
            while remaining:  # unbuffered: a full disk may take a part of the line, and refuses the rest
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            raise _not_writable(self.path, error) from error
        self._last_step = step

    def truncate(self, last_step: int) -> None:
        """Drop every record after `last_step`. Atomic: after a kill the file is the old one or the new one."""
        self._file.close()
        self._replace(lambda step: step <= last_step)

    def amend(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Replace the record of `step`, the last one, or append it where there is none. Atomic, as `truncate` is."""
        self._file.close()
        self._replace(lambda found: found < step, encode(step, metrics))
        self._last_step = step

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _replace(self, keep: Callable[[int], bool], added: bytes = b"") -> None:
        """Rewrite the file with the records to keep and `added`, if that changes it, and open it for appending."""
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
            kept = []
            for line, record in _records(content, self.path):
                if keep(record["step"]):
                    kept.append(line + b"\n")
                    self._last_step = record["step"]
            if not kept:
                self._last_step = -1
            new = b"".join(kept) + added
            if new != content:
                temporary = self.path.with_name(self.path.name + ".tmp")
                with temporary.open("wb") as file:
                    file.write(new)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise _not_writable(self.path, error) from error


def read_metrics(path: str | os.PathLike[str]) -> list[Record]:
    """Every complete record of a `metrics.jsonl`, also while it is being written; a torn last line is left out.

    Raises RunError for a missing file, and for a damaged line with its number.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(
            str(path),
            expected="a metrics.jsonl that a training run wrote",
            got=f"{type(error).__name__}: {error.strerror}",
            todo="name the run directory of a run that has started",
        ) from error
    return [record for _, record in _records(content, path)]


def encode(step: int, metrics: Mapping[str, Any]) -> bytes:
    """One line of the file.

    >>> encode(3, {"loss": float("nan"), "grad_norm": 0.5})
    b'{"step":3,"loss":null,"grad_norm":0.5,"nonfinite":["loss"]}\\n'
    """
    nonfinite: list[str] = []
    record = {"step": int(step), **{name: _plain(value, name, nonfinite) for name, value in metrics.items()}}
    if nonfinite:
        record["nonfinite"] = nonfinite
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _plain(value: Any, name: str, nonfinite: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}.{index}", nonfinite) for index, item in enumerate(value)]
    if hasattr(value, "item"):  # a scalar of NumPy or JAX
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(name)
        return None
    return value


def _records(content: bytes, path: Path) -> Iterator[tuple[bytes, Record]]:
    """(line, record) of every line that ends; what follows the last line end was torn by a kill."""
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise RunError(
                f"{path}, line {number}",
                expected="a JSON object with a whole number under 'step'",
                got=repr(line[:80]),
                todo="delete that line; the checkpoints do not depend on this file",
            )
        yield line, record


def _not_writable(path: Path, error: OSError) -> RunError:
    return RunError(
        str(path),
        expected="a file that can be written",
        got=f"{type(error).__name__}: {error.strerror}",
        todo="free disk space or mend the permissions, then resume the run",
    )
