"""A file of requests to a file of answers, by the engine in this process: `jaxml batch`.

Reads `recipes.batch_files`, `infer.engine`, `infer.language_model`, and of `serve` what reads a request and writes an
answer, so that a line is answered as the service would; `cli.batch` prints the report.
"""

from __future__ import annotations

import os
import queue
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from jaxml.errors import DataError, JaxmlError, RequestError
from jaxml.infer.engine import Engine, EngineSpec
from jaxml.infer.language_model import LanguageModel
from jaxml.infer.request import Event
from jaxml.observe.progress import Stream, duration
from jaxml.recipes.batch_files import Ledger, Line, Record, custom_id_of, numbered_lines, parse_line
from jaxml.serve.answers import Answer
from jaxml.serve.errors import told
from jaxml.serve.requests import CompletionCall, parse_chat, parse_completion
from jaxml.serve.served import Served

PARSERS: dict[str, Callable[[Any, Served], CompletionCall]] = {
    "/v1/completions": parse_completion,
    "/v1/chat/completions": parse_chat,
}
AHEAD = 4  # times max_batch: requests that the engine has at hand
HELD = 64  # times max_batch: lines whose answers wait for an earlier one
TELL_EVERY_S = 1.0


@dataclass(frozen=True)
class BatchReport:
    """`num_lines` in all, of which `num_before` were done by an earlier start and `num_bad` are in `errors`; the tokens of
    this start's prompts and answers, and its seconds from the first line on."""

    out: str
    errors: str
    num_lines: int
    num_before: int
    num_bad: int
    num_failed: int
    num_prompt_tokens: int
    num_tokens: int
    seconds: float


@dataclass
class Pending:
    """A line that was taken and is not written yet. `record` is there when it has ended."""

    number: int
    record: Record | None = None
    line: Line | None = None
    answer: Answer | None = None


def run_batch(
    path: str | os.PathLike[str], source: Path, out: Path, stream: Stream, *, max_batch: int = 8
) -> BatchReport:
    """Answer each line of `source` by the model at `path`, in order, into `out`; a line that cannot be right goes to
    `OUT.errors.jsonl` by its number. Called again after a kill it goes on after the last line that is in one of them.

    Raises DataError: no such input, an `out` that belongs to another; CheckpointError (see `open_checkpoint`).
    """
    if not source.is_file() or source.resolve() == out.resolve():
        raise DataError(
            f"the input {source}", expected="a file of JSON lines, not that of the answers", got="none", todo="name it"
        )
    errors = out.with_name(out.stem + ".errors.jsonl")
    num_lines = sum(1 for _ in numbered_lines(source))
    with Ledger(out, errors) as ledger:
        num_before, bad_before = ledger.num_done(source)
        if num_before == num_lines:
            return BatchReport(str(out), str(errors), num_lines, num_before, bad_before, 0, 0, 0, 0.0)
        run = _Run(path, source, ledger, stream, max_batch, num_lines, num_before)
        run.go()
        return BatchReport(
            str(out),
            str(errors),
            num_lines,
            num_before,
            bad_before + run.num_bad,
            run.num_failed,
            run.num_prompt_tokens,
            run.num_tokens,
            run.seconds,
        )


class _Run:
    """One start: lines go in as the engine has room, records come out in order."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        source: Path,
        ledger: Ledger,
        stream: Stream,
        max_batch: int,
        num_lines: int,
        num_before: int,
    ):
        self._ledger, self._stream, self._max_batch = ledger, stream, max_batch
        self._num_lines, self._num_before = num_lines, num_before
        model = LanguageModel.open(path)
        name, tokenizer = model.opened.described.name, model.opened.require_tokenizer()
        self._served = Served(name, tokenizer, model.context_length, created=int(time.time()))
        self._arrived: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        room = AHEAD * max_batch + self._served.limits.answers
        spec = EngineSpec(max_batch=max_batch, max_queue=room)
        self._engine = Engine(model, spec, emit=self._arrived.put)
        self._lines: Iterator[tuple[int, bytes]] = islice(numbered_lines(source), num_before, None)
        self._seen = {custom_id_of(line) for _, line in islice(numbered_lines(source), num_before)}
        self._waiting: deque[Pending] = deque()
        self._owner: dict[str, Pending] = {}  # by the ids of requests that the engine has
        self._told_s = self._begun_s = time.monotonic()
        self._num_written = 0
        self.num_bad = self.num_failed = self.num_prompt_tokens = self.num_tokens = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun_s

    def go(self) -> None:
        """Until every line is written."""
        self._engine.warm_up()
        self._engine.start()
        self._begun_s = time.monotonic()
        try:
            while self._take_lines() or self._waiting:
                if not self._write_ended():
                    for event in self._arrived.get():
                        self._note(event)
        finally:
            self._engine.close()
        self._tell(is_last=True)

    def _take_lines(self) -> bool:
        """Whether there was a line to take and room for it."""
        is_taken = False
        while len(self._owner) < AHEAD * self._max_batch and len(self._waiting) < HELD * self._max_batch:
            found = next(self._lines, None)
            if found is None:
                break
            self._waiting.append(self._begin(*found))
            is_taken = True
        return is_taken

    def _begin(self, number: int, text: bytes) -> Pending:
        """The line, asked of the engine; or ended already, because it cannot be right."""
        custom_id = custom_id_of(text)
        is_repeated = custom_id in self._seen
        self._seen.add(custom_id)
        try:
            line = parse_line(number, text, PARSERS)
            if is_repeated:
                raise RequestError(
                    "custom_id", expected="text that no other line has", got="that of a line before", todo="change it"
                )
            call = PARSERS[line.url](line.body, self._served)
            pending = Pending(number, line=line, answer=Answer(call, self._served.tokenizer))
            self._submit(pending)
        except RequestError as error:
            self.num_bad += 1
            told_error = {"message": told(error), "param": error.faults[0].failed}
            return Pending(number, Record(number, True, {"line": number, "custom_id": custom_id, "error": told_error}))
        self.num_prompt_tokens += call.num_prompt_tokens
        return pending

    def _submit(self, pending: Pending) -> None:
        assert pending.answer is not None
        begun: list[str] = []
        try:
            for request in pending.answer.requests:
                self._engine.submit(request)
                begun.append(request.id)
                self._owner[request.id] = pending
        except JaxmlError:
            self._forget(begun)
            raise

    def _forget(self, ids: list[str]) -> None:
        for id in ids:
            if self._owner.pop(id, None) is not None:
                self._engine.cancel(id)

    def _note(self, event: Event) -> None:
        pending = self._owner.get(event.id)
        if pending is None:
            return
        answer, line = pending.answer, pending.line
        assert answer is not None and line is not None
        answer.take(event)
        if event.finish_reason is not None:
            del self._owner[event.id]
            self.num_tokens += event.num_tokens
        if answer.failure is not None:
            self.num_failed += 1
            self._forget([request.id for request in answer.requests])
        if answer.failure is not None or answer.is_finished:
            reply = answer.reply()
            response = {"status_code": reply.status, "request_id": answer.id, "body": reply.body}
            found = reply.body.get("error") if answer.failure is not None else None
            error = None if found is None else {"code": found.get("code"), "message": found.get("message")}
            value = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id}
            pending.record = Record(line.number, False, {**value, "response": response, "error": error})

    def _write_ended(self) -> bool:
        """Whether the first lines that wait had ended, and are written now."""
        ended: list[Record] = []
        while self._waiting and (record := self._waiting[0].record) is not None:
            ended.append(record)
            self._waiting.popleft()
        self._ledger.append(ended)
        self._num_written += len(ended)
        if time.monotonic() - self._told_s >= TELL_EVERY_S:
            self._tell()
        return bool(ended)

    def _tell(self, is_last: bool = False) -> None:
        self._told_s = time.monotonic()
        words = [f"{self._num_before + self._num_written:,} of {self._num_lines:,} lines"]
        words.append(f"{self.num_tokens / max(self.seconds, 1e-9):,.0f} tokens/s")
        if self.num_bad:
            words.append(f"{self.num_bad:,} bad")
        if self._num_written and not is_last:
            left_s = self.seconds / self._num_written * (self._num_lines - self._num_before - self._num_written)
            words.append(f"{duration(left_s)} left")
        print("jaxml batch: " + ", ".join(words), file=self._stream, flush=True)
