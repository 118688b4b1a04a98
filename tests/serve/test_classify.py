"""A text classifier behind LitServe: what is asked, what is answered, and that company does not change an answer."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxml.errors import RequestError
from jaxml.infer.predict import TextClassifier
from jaxml.serve.classify import MAX_TEXTS, texts_of
from tests.infer.written import LABELS, write_classifier
from tests.serve.servers import Server, free_port, jaxml_serve, running

PATH = "/v1/classify"
TEXTS = [f"{'free entry' if number % 3 else 'see you'} {number}" for number in range(40)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("classifier"), too_long="refuse")


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    command = jaxml_serve(str(checkpoint), "--port", str(port), "--max-batch", "4", "--name", "spam-1")
    with running(command, port, tmp_path_factory.mktemp("log") / "log") as server:
        yield server


def test_answers_in_batches_equal_single_ones_bit_for_bit_and_those_in_python(server: Server, checkpoint: Path) -> None:
    def ask(text: str) -> dict[str, Any]:
        status, answer = server.post(PATH, {"input": text})
        assert status == 200 and answer["model"] == "spam-1", answer
        return answer["results"][0]

    alone = [ask(text) for text in TEXTS]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, TEXTS)) == alone
    assert server.post(PATH, {"input": TEXTS, "model": "spam-1"})[1]["results"] == alone
    for result, expected in zip(alone, TextClassifier.open(checkpoint, 4).predict(TEXTS), strict=True):
        assert tuple(result["probabilities"]) == LABELS
        assert (result["label"], result["probabilities"]) == (
            expected.label,
            pytest.approx(expected.probabilities, rel=1e-5),
        )


def test_one_text_that_is_refused_does_not_disturb_the_others(server: Server) -> None:
    bodies = [{"input": text} for text in TEXTS[:6]] + [{"input": ["ok", "y" * 50]}, {"input": "ok", "labels": 1}]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: server.post(PATH, body), bodies))
    assert [status for status, _ in answers] == [200] * 6 + [400, 400]
    assert "input[1]" in answers[6][1]["error"]["message"] and "yyyy" not in answers[6][1]["error"]["message"]
    assert "labels" in answers[7][1]["error"]["message"]


def test_refusals_have_openais_shape(server: Server) -> None:
    assert server.post(PATH, b"{")[1]["error"]["code"] == "invalid_json"
    assert server.post(PATH, b" " * (5 * 2**20))[0] == 413
    assert server.post("/v1/completions", {})[0] == 404
    assert server.stats() == {"status": "ready"}


def test_ctrl_c_reaches_every_process_and_ends_an_idle_server_with_code_0(server: Server) -> None:
    begun = time.monotonic()
    os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does
    assert server.wait_end() == 0
    assert time.monotonic() - begun < 5
    assert "SIGINT: stopping" in server.said() and "Traceback" not in server.said()
    assert server.leftovers() == []


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ([], "the body"),
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 3]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": ["a"] * (MAX_TEXTS + 1)}, "input"),
        ({"input": "a", "model": "other"}, "model"),
        ({"input": "a", "top_p": 1}, "top_p"),
    ],
)
def test_every_fault_of_a_body_is_named(body: Any, fault: str) -> None:
    with pytest.raises(RequestError) as refused:
        texts_of(body, "spam")
    assert [found.failed for found in refused.value.faults] == [fault]


def test_one_text_or_a_list_of_them() -> None:
    assert texts_of({"input": "a"}, "spam") == ["a"]
    assert texts_of({"input": ["a"] * MAX_TEXTS, "model": "spam"}, "spam") == ["a"] * MAX_TEXTS
