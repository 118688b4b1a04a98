"""A server with the small engine, seen through HTTP: answers, refusals, streams, and clients that leave."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jaxml.infer.request import Request, Sampling
from tests.serve.servers import Server, cpu_s, small_server, wait_until
from tests.serve.small_engine import CONTEXT_LENGTH, answer_of

COMPLETIONS = "/v1/completions"
FOREVER = 50_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with small_server(tmp_path_factory.mktemp("serve"), max_batch=4, max_queue=8) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def _places_are_free_afterwards(server: Server) -> Iterator[None]:
    yield
    server.settled(status="ready", running=0, queued=0)


def expected(prompt: str, max_tokens: int, seed: int | None = None) -> str:
    return answer_of(Request("", tuple(prompt.encode()), Sampling(max_tokens=max_tokens, seed=seed)))


def test_the_official_client_gets_the_answer_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "prompt": "hello", "max_tokens": 20}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text == expected("hello", 20)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 20)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_models_are_listed_with_the_effective_limit(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "small" and model.to_dict()["max_model_len"] == CONTEXT_LENGTH


def test_several_prompts_and_choices_come_merged_each_to_its_own_end(client: openai.OpenAI) -> None:
    prompts = ["a", "b" * 40]
    stream = client.completions.create(model="small", prompt=prompts, n=2, seed=5, max_tokens=9, stream=True)
    texts, ends = {}, {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == {2 * i + j: expected(prompts[i], 9, 5 + j) for i in range(2) for j in range(2)}
    assert ends == dict.fromkeys(range(4), "length")


def test_answers_given_at_the_same_time_are_those_given_alone(server: Server) -> None:
    def ask(number: int) -> str:
        status, answer = server.post(COMPLETIONS, {"prompt": f"prompt {number}", "max_tokens": 30})
        assert status == 200
        return answer["choices"][0]["text"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [expected(f"prompt {number}", 30) for number in range(8)]


def test_a_stream_is_an_event_stream_that_ends_with_done(server: Server) -> None:
    status, content, headers = server.request("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 2, "stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    events = content.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-2])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", ["decoding", "prefill", "queue"])
def test_a_client_that_leaves_frees_its_place(server: Server, stage: str, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": FOREVER, "stream": stream}
    before = [server.open_request(COMPLETIONS, body) for _ in range(4 if stage == "queue" else 0)]
    if before:
        server.settled(running=4)
    counts = server.stats()
    leaving = server.open_request(COMPLETIONS, body | {"prompt": "y" * 90_000 if stage == "prefill" else "y"})
    if stage == "queue":
        server.settled(running=4, queued=1)
    else:
        server.settled(running=1)
    if stage == "decoding" and stream:
        assert leaving.recv(10)
    leaving.close()
    server.settled(cancelled=counts["cancelled"] + 1, queued=0, running=len(before))
    for connection in before:
        connection.close()


def test_one_choice_that_fails_ends_a_stream_with_an_error_and_a_whole_answer_with_500(
    server: Server, client: openai.OpenAI
) -> None:
    client = client.with_options(timeout=10)  # It does not wait for the choice that would go on for a minute.
    with pytest.raises(openai.APIError, match="failed to answer"):
        list(client.completions.create(model="small", prompt=["fine", "\r"], max_tokens=FOREVER, stream=True))
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="small", prompt=["fine", "\r"], max_tokens=FOREVER)
    server.settled(running=0)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe\x00", b'{"prompt": NaN}', b"[" * 100_000, b"1" * 5000])
def test_a_body_that_is_no_json_is_a_400_in_openais_shape(server: Server, body: bytes) -> None:
    status, answer = server.post(COMPLETIONS, body)
    assert status == 400 and answer["error"]["code"] == "invalid_json", answer
    assert answer["error"]["type"] == "invalid_request_error"


def test_an_unknown_field_and_another_model_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="small", prompt="x", extra_body={"top_pp": 1})
    assert refused.value.param == "top_pp" and "top_p" in refused.value.message
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="chat template"):
        client.chat.completions.create(model="small", messages=[{"role": "user", "content": "x"}])


def test_a_body_that_is_too_large_is_refused_whether_or_not_it_says_so(server: Server) -> None:
    large = b'{"prompt": "' + b"x" * (3 * 2**20) + b'"}'
    status, answer = server.post(COMPLETIONS, large)
    assert status == 413 and "1048576" in answer["error"]["message"]
    pieces = iter([large[:1_000_000], large[1_000_000:]])  # an iterator goes in chunks, without a Content-Length
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", COMPLETIONS, pieces, {"Content-Type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/embeddings", 405),
        ("POST", "/", 404),
        ("GET", "/metrics", 404),
        ("GET", "/info", 404),
        ("GET", "/health", 404),
        ("GET", "/docs", 404),
        ("GET", "/redoc", 404),
        ("POST", "/openapi.json", 405),
        ("POST", "/shutdown", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/../info", 404),
    ],
)
def test_nothing_else_is_there_and_the_refusal_has_openais_shape(
    server: Server, method: str, path: str, status: int
) -> None:
    got, answer, headers = server.request(method, path)
    assert got == status and set(answer["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in headers) == (status == 405)


def test_when_too_many_wait_the_next_one_is_told_to_come_back(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": FOREVER}
    waiting = [server.open_request(COMPLETIONS, body) for _ in range(12)]
    server.settled(running=4, queued=8)
    status, answer, headers = server.request("POST", COMPLETIONS, body)
    assert status == 429 and answer["error"]["code"] == "queue_full" and headers["retry-after"] == "1"
    assert server.stats()["status"] == "ready"
    for connection in waiting:
        connection.close()


def test_health_is_for_probes(server: Server) -> None:
    assert server.request("GET", "/health/live")[:2] == (200, {"status": "live"})
    status, answer, _ = server.request("GET", "/health/ready")
    assert status == 200 and answer["status"] == "ready" and answer["free_places"] == 4
    assert server.request("HEAD", "/health/ready")[0] == 200


def test_an_idle_worker_does_nothing(server: Server) -> None:
    pids = {"worker": server.worker_pid(), "API server": server.api_pid(), "main": server.process.pid}
    before, begun = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
    time.sleep(2.5)
    used = {name: (cpu_s(pid) - before[name]) / (time.monotonic() - begun) for name, pid in pids.items()}
    assert used["worker"] < 0.02 and used["main"] < 0.02, used
    assert used["API server"] < 0.05, used  # uvicorn's tick and LitServe's poll of a queue that stays empty


def test_nothing_that_clients_sent_is_in_the_log(server: Server) -> None:
    server.post(COMPLETIONS, {"prompt": "confidential\r", "max_tokens": 2})
    server.post(COMPLETIONS, {"prompt": "confidential", "temperature": -1})
    server.post(COMPLETIONS, b'{"confidential')
    assert "confidential" not in server.said()
    wait_until(lambda: server.stats()["running"] == 0)
