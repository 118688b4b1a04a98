"""Laws of the load: real sockets to a small server, times that are those of the answers, and rows that say so."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.http_load import Answer, AnswerError, Load, load, quantile
from benchmarks.serve_rows import STREAMS, load_rows, told_by
from benchmarks.verbs import SERVE_AIMS, VERBS

FIRST_S, REST_S = 0.05, 0.1


def event(text: str, reason: str | None) -> str:
    return f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': reason}]})}\n\n"


@contextlib.contextmanager
def server(reason: str = "length", status: int = 200) -> Iterator[int]:
    """Answers every request: nothing yet at once, a text after FIRST_S, the end after REST_S more."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.end_headers()
            whole = json.dumps({"choices": [{"text": "a length b", "finish_reason": reason}]})
            parts = [event("", None), event("a length", None), event(" b", reason) + "data: [DONE]\n\n"]
            for text, pause_s in zip(parts if body["stream"] else ["", "", whole], (0, FIRST_S, REST_S), strict=True):
                time.sleep(pause_s)
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield listening.server_address[1]
        finally:
            listening.shutdown()
            thread.join()


def test_a_stream_has_a_first_text_and_an_end():
    with server() as port:
        measured = load(port, "/", {"stream": True, "max_tokens": 3}, streams=2, seconds=0.3)
    assert len(measured.answers) >= 2
    for answer in measured.answers:
        assert answer.first_s >= FIRST_S
        assert answer.end_s - answer.first_s >= 0.9 * REST_S
    assert measured.seconds >= 0.3
    assert 0.0 < measured.client_share < 1.0


def test_a_whole_answer_ends_when_it_comes():
    with server() as port:
        measured = load(port, "/", {"stream": False, "max_tokens": 3}, streams=1, seconds=0.1)
    assert all(answer.first_s == answer.end_s >= FIRST_S + REST_S for answer in measured.answers)


@pytest.mark.parametrize("stream", [True, False])
def test_a_short_answer_and_a_refusal_are_no_measurement(stream):
    body = {"stream": stream, "max_tokens": 3}
    with server(reason="stop") as port, pytest.raises(AnswerError):
        load(port, "/", body, streams=1, seconds=0.1)
    with server(status=503) as port, pytest.raises(AnswerError, match="503"):
        load(port, "/", body, streams=1, seconds=0.1)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_the_least_value_that_a_share_does_not_exceed(values, share):
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values) or found == min(values)


def test_rates_and_times_follow_from_the_answers():
    answers = (Answer(0.1, 0.3), Answer(0.2, 0.4))
    told = told_by(Load(answers, seconds=0.5, num_tokens=3, client_share=0.1), 4, is_streamed=True)
    assert told["requests, 4"] == 4.0
    assert told["tokens, 4"] == 12.0
    assert told["TTFT p50, 4"] == pytest.approx(100.0)
    assert told["TTFT p95, 4"] == pytest.approx(200.0)
    assert told["TPOT p50, 4"] == pytest.approx(100.0)
    assert "TTFT p50, 4" not in told_by(Load(answers, 0.5, 3, 0.1), 4, is_streamed=False)


def test_rows_have_every_number_and_the_plots_find_theirs():
    streamed = Load((Answer(0.1, 0.2),), 1.0, 64, 0.1)
    samples = {
        f"{server}{kind}": [
            {name: value for streams in STREAMS for name, value in told_by(streamed, streams, not kind).items()}
        ]
        for kind in ("", ", whole")
        for server in ("jaxml serve", "LitServe loop")
    }
    rows = {row.name: row for row in load_rows(samples)}
    assert rows["jaxml serve tokens, 8 streams"].values == (64.0,)
    assert rows["LitServe loop requests, whole, 1 stream"].values == (1.0,)
    assert rows["jaxml serve / LitServe loop tokens, whole, 4 streams"].values == (1.0,)
    assert rows["jaxml serve TTFT p95, 4 streams"].is_bound
    assert not rows["jaxml serve TTFT p50, 4 streams"].is_bound
    assert rows["the client's share of a core"].values == (0.1,)
    for names in VERBS["serve"].panels.values():
        assert set(names) <= set(rows)
    assert set(SERVE_AIMS) == {"jaxml serve ready, warm"}
