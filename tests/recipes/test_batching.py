"""`jaxml batch`: every line is answered or refused exactly once, in order, also across kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxml.cli import main as command
from jaxml.cli.batch import main
from jaxml.errors import DataError
from jaxml.infer.language_model import LanguageModel
from jaxml.infer.runner import FastRunner
from jaxml.recipes import batching
from jaxml.recipes.batch_files import Ledger, Record, numbered_lines
from tests.infer.written import write_language_model


def line(custom_id: Any, url: str = "/v1/completions", **body: Any) -> str:
    body = {"prompt": "The fox", "max_tokens": 4, "temperature": 0, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


# Lines 2, 4, 6, 7 and 9 cannot be right; line 5 is blank. Long and short answers end out of order.
LINES = [
    line("a", max_tokens=24),
    "not json",
    line("b", prompt="A dog"),
    line("c", temperature=-1),
    "",
    line("a", prompt="again"),
    line("d", url="/v1/images"),
    line("e", n=2, seed=5, temperature=1.0, max_tokens=3),
    line("f", stream=True),
    line("g", logprobs=1),
    line("h", prompt="One more", max_tokens=12),
]
GOOD, BAD = ["a", "b", "e", "g", "h"], [2, 4, 6, 7, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_language_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _known_verb(monkeypatch) -> None:
    monkeypatch.setitem(command.VERBS, "batch", ("batch", "", ""))


def asked(folder: Path, lines: list[str] = LINES) -> Path:
    file = folder / "in.jsonl"
    file.write_text("".join(text + "\n" for text in lines))
    return file


def told(folder: Path) -> tuple[list[dict], list[dict]]:
    """(answers, errors) in the files."""
    files = (folder / "out.jsonl", folder / "out.errors.jsonl")
    answers, errors = ([json.loads(text) for text in file.read_text().splitlines()] for file in files)
    return answers, errors


def batch(model: Path, folder: Path) -> dict:
    words = [str(model), str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--max-batch", "2"]
    return main(words)[0]


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory) -> tuple[Path, dict]:
    """All lines in one start."""
    folder = tmp_path_factory.mktemp("straight")
    asked(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(command.VERBS, "batch", ("batch", "", ""))
        return folder, batch(model, folder)


def texts(answers: list[dict]) -> list[tuple[str, list[str]]]:
    return [(a["custom_id"], [c["text"] for c in a["response"]["body"]["choices"]]) for a in answers]


def test_each_line_is_answered_in_order_or_told_by_its_number(straight, model):
    folder, report = straight
    answers, errors = told(folder)
    assert [answer["custom_id"] for answer in answers] == GOOD
    assert [error["line"] for error in errors] == BAD
    assert [error["error"]["param"] for error in errors] == ["line", "temperature", "custom_id", "url", "body.stream"]
    assert (report["num_lines"], report["num_bad"], report["num_before"], report["num_failed"]) == (10, 5, 0, 0)
    for answer in answers:
        assert set(answer) == {"id", "custom_id", "response", "error"} and answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"] == answer["response"]["body"]["id"]
    assert len({answer["id"] for answer in answers}) == len(answers)
    assert report["num_tokens"] == sum(a["response"]["body"]["usage"]["completion_tokens"] for a in answers)
    alone = LanguageModel.open(model).generate("The fox", max_tokens=24, temperature=0).text
    assert texts(answers)[0] == ("a", [alone])


class Killed(BaseException):
    """What ends a process in these tests."""


@pytest.mark.parametrize("num_written", [3, 9])
def test_after_a_kill_it_goes_on_without_repeating_or_losing_a_line(
    straight, model, tmp_path, monkeypatch, num_written
):
    asked(tmp_path)
    real, count = Ledger.append, 0

    def append(self: Ledger, records: list[Record]) -> None:
        nonlocal count
        for record in records:
            if count == num_written:
                raise Killed
            real(self, [record])
            count += 1

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "append", append)
        with pytest.raises(Killed):
            batch(model, tmp_path)
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"id": "batch_req_torn", "custom')  # in the middle of a line
    assert batch(model, tmp_path)["num_before"] == num_written
    answers, errors = told(tmp_path)
    assert texts(answers) == texts(told(straight[0])[0])
    assert errors == told(straight[0])[1]


def test_what_is_done_is_not_done_again_and_not_for_another_input(straight, model, tmp_path, monkeypatch):
    folder, _ = straight
    before = told(folder)
    monkeypatch.setattr(batching.LanguageModel, "open", None)  # not even opened
    report = batch(model, folder)
    assert (report["num_before"], report["num_tokens"]) == (10, 0)
    assert told(folder) == before
    for name in ("out.jsonl", "out.errors.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    asked(tmp_path, [line("z"), *LINES])
    with pytest.raises(DataError, match="those of other lines, from number 1 on"):
        batch(model, tmp_path)


def test_an_answer_that_the_engine_loses_is_told_as_a_failure_and_the_next_ones_come(model, tmp_path, monkeypatch):
    asked(tmp_path, [line("a"), line("b"), line("c")])
    real, count = FastRunner.run, 0

    def run(self: FastRunner, *given: Any) -> Any:
        nonlocal count
        count += 1
        if count == 1:
            raise RuntimeError("a device that fails")
        return real(self, *given)

    monkeypatch.setattr(FastRunner, "run", run)
    report = batch(model, tmp_path)
    answers, errors = told(tmp_path)
    assert [answer["custom_id"] for answer in answers] == ["a", "b", "c"] and not errors
    failed = [answer["custom_id"] for answer in answers if answer["error"] is not None]
    assert failed and "c" not in failed and report["num_failed"] == len(failed)
    assert answers[0]["response"]["status_code"] == 500
    assert answers[0]["error"]["message"] == answers[0]["response"]["body"]["error"]["message"]


def test_a_torn_line_of_any_length_is_cut_and_nothing_else(tmp_path):
    whole = b'{"custom_id": "a"}\n' * 3
    for torn in (b"", b"{", b"x" * 200_000):
        (tmp_path / "out").write_bytes(whole + torn)
        with Ledger(tmp_path / "out", tmp_path / "errors"):
            pass
        assert (tmp_path / "out").read_bytes() == whole
    (tmp_path / "out").write_bytes(b"x" * 100)
    with Ledger(tmp_path / "out", tmp_path / "errors"):
        pass
    assert (tmp_path / "out").read_bytes() == b""


def test_blank_lines_are_no_lines_and_numbers_are_those_of_the_file(tmp_path):
    assert [number for number, _ in numbered_lines(asked(tmp_path, ["x", "", "  ", "y"]))] == [1, 4]
