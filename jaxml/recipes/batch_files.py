"""The files of an offline batch: lines that are asked, and the two files in which each of them ends exactly once, in order.

Reads `errors`; `recipes.batching` runs what lies between. Lines have the form of OpenAI's batch API. No jax.

A record is appended when the records of all lines before it are in a file and synced. So after a kill the files tell of
the first n lines and no others, at most with the torn beginning of one more, which `Ledger` cuts off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

from jaxml.errors import DataError, RequestError

FIELDS = ("custom_id", "method", "url", "body")
MAX_LINE_BYTES = 2**20


@dataclass(frozen=True)
class Line:
    """A request in a file. `number` counts lines from 1; `body` is what the endpoint `url` takes."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Record:
    """How a line ended: `value` goes to the answers, or (is_bad) to the errors."""

    number: int
    is_bad: bool
    value: dict[str, Any]


def numbered_lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of each line that is not blank."""
    with source.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def parse_line(number: int, line: bytes, urls: Iterable[str]) -> Line:
    """The request in a line. Raises RequestError, the first fault named after its field."""
    if len(line) > MAX_LINE_BYTES:
        _refuse("line", f"at most {MAX_LINE_BYTES} bytes", f"{len(line)}", "shorten it")
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _refuse("line", "a JSON object in UTF-8", f"{type(error).__name__}", "write one object a line")
    if not isinstance(value, dict):
        _refuse("line", "a JSON object", type(value).__name__, "write one object a line")
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        _refuse("custom_id", "text that no other line has", _shown(custom_id), "give every line its own")
    if value.get("method") != "POST":
        _refuse("method", "'POST'", _shown(value.get("method")), "correct it")
    if not isinstance(url, str) or url not in urls:
        _refuse("url", "one of " + ", ".join(urls), _shown(url), "correct it")
    others = sorted(set(value) - set(FIELDS))
    if others:
        _refuse(others[0], "one of " + ", ".join(FIELDS), "another field", "leave it out")
    if not isinstance(body, dict):
        _refuse("body", "a JSON object", _shown(body), "what the endpoint takes")
    if body.get("stream"):
        _refuse("body.stream", "false: an answer is one line", "true", "leave it out")
    return Line(number, custom_id, url, body)


def custom_id_of(line: bytes) -> str | None:
    """The custom_id of a line, good or bad, where it has one."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    return custom_id if isinstance(custom_id, str) else None


class Ledger:
    """The answers in `out` and the bad lines in `errors`, both JSON lines, opened to go on where they end."""

    def __init__(self, out: Path, errors: Path):
        self.out, self.errors = out, errors
        self._files: dict[bool, BinaryIO] = {}
        for is_bad, path in ((False, out), (True, errors)):
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(path)
            self._files[is_bad] = path.open("ab")

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def num_done(self, source: Path) -> tuple[int, int]:
        """(lines of `source` that have ended, those of them that were bad): always its first ones.

        Raises DataError where the files tell of other lines: they belong to another batch.
        """
        bad = {record.get("line") for record in _records(self.errors)}
        answers = (record.get("custom_id") for record in _records(self.out))
        answered, num_done = next(answers, None), 0
        for number, line in numbered_lines(source):
            if number not in bad:
                if answered is None or custom_id_of(line) != answered:
                    break
                answered = next(answers, None)
            num_done += 1
        bad_done = len(bad)
        if answered is not None or (bad and num_done < max(number for number in bad if isinstance(number, int))):
            raise DataError(
                f"going on with {self.out}",
                expected=f"answers to the first lines of {source}, in order",
                got=f"those of other lines, from number {num_done + 1} on",
                todo="name another file with -o, or the input that it began with",
            )
        return num_done, bad_done

    def append(self, records: Iterable[Record]) -> None:
        """Write records, in the order of their lines, so that each is on the disk before the next file is touched."""
        last: BinaryIO | None = None
        for record in records:
            file = self._files[record.is_bad]
            if last is not None and last is not file:
                _sync(last)
            text = json.dumps(record.value, ensure_ascii=False, allow_nan=False)
            file.write(text.encode("utf-8", "replace") + b"\n")
            last = file
        if last is not None:
            _sync(last)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if not isinstance(value, dict):
                todo = "name another file with -o, or remove it to begin again"
                raise DataError(f"line {number} of {path}", expected="a JSON object", got="something else", todo=todo)
            yield value


def _cut_torn_line(path: Path) -> None:
    """Drop what comes after the last line feed: a record that a kill cut off."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - 2**16)
            file.seek(start)
            found = file.read(keep - start).rfind(b"\n")
            if found >= 0:
                keep = start + found + 1
                break
            keep = start
        if keep < end:
            file.truncate(keep)
            _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _shown(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__ if not isinstance(value, str) else repr(value[:60])


def _refuse(failed: str, expected: str, got: str, todo: str) -> NoReturn:
    raise RequestError(failed, expected=expected, got=got, todo=todo)
