"""A service with keys, tiers, two models and an operations bind, seen from outside: who gets in, to what, and how often."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from jaxml.infer.request import Request, Sampling
from jaxml.serve.guard import Door, _Sending
from jaxml.serve.keys import add_key, revoke_key
from jaxml.serve.metrics import Metrics
from tests.serve.servers import Server, free_port, small_server, wait_until
from tests.serve.small_engine import answer_of

COMPLETIONS = "/v1/completions"
ASKED = {"model": "small", "prompt": "confidential", "max_tokens": 4}
# Names of tenants, and the fields of their tiers.
TIERS = {
    "alice": ["paid"],
    "bob": ["free", 2],
    "carol": ["tokens", None, 40],
    "dave": ["one", None, None, 1],
    "erin": ["slow", None, None, None, ["batch"]],
}


@dataclass(frozen=True)
class Service:
    server: Server
    operations: int
    file: Path
    log: Path
    keys: dict[str, str]

    def post(self, tenant: str, body: object = ASKED) -> tuple[int, dict, dict[str, str]]:
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        return self.server.request("POST", COMPLETIONS, body, headers=headers)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("door")
    file, log, operations = directory / "keys.json", directory / "requests.log", free_port()
    keys = {tenant: add_key(file, tenant, fields[0])[1] for tenant, fields in TIERS.items()}
    access = {"keys": str(file), "tiers": list(TIERS.values()), "operations": ["127.0.0.1", operations]}
    access |= {"price_per_device_hour": 2.5, "request_log": str(log)}
    with small_server(directory, access=access, names=("small", "other")) as server:
        server.key = keys["alice"]
        yield Service(server, operations, file, log, keys)
        assert not [key for key in keys.values() if key in server.said() + log.read_text()]
        assert "confidential" not in server.said() + log.read_text()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", COMPLETIONS),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/health/ready"),
        ("GET", "/stats"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/metrics"),
        ("GET", "/v1/../health/live"),
        ("GET", "//"),
        ("POST", "/"),
        ("POST", "/health/live"),
        ("GET", "/nothing"),
    ],
)
@pytest.mark.parametrize("key", [None, "wrong", "schlüssel", ""], ids=["none", "wrong", "not ASCII", "empty"])
def test_without_a_key_nothing_is_there(service: Service, method: str, path: str, key: str | None) -> None:
    headers = {"Authorization": "" if key is None else f"Bearer {key}"}  # http.client writes it as Latin-1
    status, answer, got = service.server.request(method, path, b"{" if method == "POST" else None, headers=headers)
    assert status == 401 and answer["error"]["code"] == "invalid_api_key"
    assert got["www-authenticate"] == "Bearer"


def test_the_page_and_whether_the_process_lives_are_for_everybody(service: Service) -> None:
    for path, kind in (("/", "text/html"), ("/health/live", "application/json")):
        status, _, headers = service.server.request("GET", path, headers={"Authorization": ""})
        assert status == 200 and headers["content-type"].startswith(kind)


def test_nobodys_body_is_not_waited_for(service: Service) -> None:
    with socket.create_connection(("127.0.0.1", service.server.port), timeout=5) as connection:
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 401")


def test_two_models_answer_by_their_names(service: Service) -> None:
    with openai.OpenAI(base_url=f"{service.server.url}/v1", api_key=service.keys["alice"], max_retries=0) as client:
        assert [model.id for model in client.models.list().data] == ["small", "other"]
        assert client.models.retrieve("other").id == "other"
        for name in ("small", "other"):
            answer = client.completions.create(model=name, prompt="hello", max_tokens=5)
            assert answer.model == name
            assert answer.choices[0].text == answer_of(Request("", tuple(b"hello"), Sampling(max_tokens=5)))
    with (
        openai.OpenAI(base_url=f"{service.server.url}/v1", api_key="sk-no", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_a_tenant_that_asks_too_often_is_told_when_to_come_back_and_its_neighbour_is_not(service: Service) -> None:
    first, second = service.post("bob"), service.post("bob")
    assert (first[0], second[0]) == (200, 200)
    assert second[2]["x-ratelimit-limit-requests"] == "2" and second[2]["x-ratelimit-remaining-requests"] == "0"
    with (
        openai.OpenAI(base_url=f"{service.server.url}/v1", api_key=service.keys["bob"], max_retries=0) as client,
        pytest.raises(openai.RateLimitError) as refused,
    ):
        client.completions.create(model="small", prompt="x")
    assert refused.value.code == "rate_limit_exceeded"
    assert 20 <= int(refused.value.response.headers["retry-after"]) <= 30
    status, _, headers = service.post("alice")
    assert status == 200 and not [name for name in headers if name.startswith("x-ratelimit")]


def test_tokens_are_counted_by_what_may_come_and_given_back_when_they_did_not(service: Service) -> None:
    status, _, headers = service.post("carol", ASKED | {"prompt": "x" * 16, "max_tokens": 4})
    assert status == 200 and headers["x-ratelimit-limit-tokens"] == "40"
    assert headers["x-ratelimit-remaining-tokens"] == "20"
    status, answer, headers = service.post("carol", ASKED | {"prompt": "x" * 16, "max_tokens": 8})
    assert status == 429 and answer["error"]["code"] == "rate_limit_exceeded" and int(headers["retry-after"]) >= 1
    status, answer, _ = service.post("carol", ASKED | {"max_tokens": 1000})
    assert status == 400 and "40" in answer["error"]["message"]


def test_requests_at_once_are_limited_and_a_client_that_leaves_makes_room(service: Service) -> None:
    service.server.key = service.keys["dave"]
    try:
        leaving = service.server.open_request(COMPLETIONS, ASKED | {"max_tokens": 50_000})
    finally:
        service.server.key = service.keys["alice"]
    service.server.settled(running=1)
    status, answer, headers = service.post("dave")
    assert status == 429 and "at once" in answer["error"]["message"] and headers["retry-after"] == "1"
    leaving.close()
    service.server.settled(running=0)
    wait_until(lambda: service.post("dave")[0] == 200)


def test_a_lane_that_the_tier_does_not_allow_is_refused_by_name(service: Service) -> None:
    status, answer, _ = service.post("erin", ASKED | {"service_tier": "priority"})
    assert status == 400 and answer["error"]["param"] == "service_tier"
    assert service.post("erin", ASKED | {"service_tier": "flex"})[0] == 200


def test_keys_come_and_go_while_it_runs_and_a_broken_file_changes_nothing(service: Service) -> None:
    added, key = add_key(service.file, "frank", "paid")
    service.keys["frank"] = key
    wait_until(lambda: service.post("frank")[0] == 200, 3.0)
    good = service.file.read_text()
    service.file.write_text("{")
    time.sleep(1.1)
    assert service.post("frank")[0] == 200
    assert "the keys stay as they were" in service.server.said()
    service.file.write_text(good)
    revoke_key(service.file, added.id)
    wait_until(lambda: service.post("frank")[0] == 401, 3.0)
    assert service.post("alice")[0] == 200


def test_who_runs_it_sees_what_happened_without_a_key_on_a_bind_of_its_own(service: Service) -> None:
    assert service.post("alice")[0] == 200

    def ask(path: str, method: str = "GET") -> tuple[int, object, dict[str, str]]:
        return service.server.request(method, path, port=service.operations, headers={"Authorization": ""})

    status, text, headers = ask("/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    assert isinstance(text, bytes) and b'tenant="alice"' in text and b'code="401"' in text
    assert b'model="other"' in text
    assert ask("/health/live")[:2] == (200, {"status": "live"})
    status, ready, _ = ask("/health/ready")
    assert status == 200 and isinstance(ready, dict) and ready["status"] == "ready"
    assert ask(COMPLETIONS)[0] == 404 and ask("/metrics", "POST")[0] == 405
    assert service.server.request("GET", "/metrics")[0] == 404, "not where clients are"
    status, summary, _ = service.server.request("GET", "/stats")
    assert status == 200 and summary["cost"]["per_hour"] == 2.5 and set(summary["models"]) == {"small", "other"}


def test_each_request_has_a_line_in_the_log(service: Service) -> None:
    assert service.post("alice")[0] == 200

    def lines() -> list[dict]:
        return [json.loads(line) for line in service.log.read_text().splitlines()]

    wait_until(lambda: [line for line in lines() if line["tenant"] == "alice" and line["code"] == 200])
    assert service.server.request("POST", COMPLETIONS, ASKED, headers={"Authorization": ""})[0] == 401
    wait_until(lambda: [line for line in lines() if line["tenant"] == "" and line["code"] == 401])
    assert service.log.stat().st_mode & 0o077 == 0


def test_a_client_that_leaves_in_the_middle_is_counted_as_such(service: Service) -> None:
    _, service.server.key = add_key(service.file, "grace", "paid")
    try:
        wait_until(lambda: service.server.request("GET", "/v1/models")[0] == 200, 3.0)
        leaving = service.server.open_request(COMPLETIONS, ASKED | {"max_tokens": 50_000, "stream": True})
        assert leaving.recv(100)
        leaving.close()
    finally:
        service.server.key = service.keys["alice"]

    def codes() -> list[int]:
        lines = [json.loads(line) for line in service.log.read_text().splitlines()]
        return [line["code"] for line in lines if line["tenant"] == "grace" and line["endpoint"] == COMPLETIONS]

    assert wait_until(codes) == [499]


@pytest.mark.parametrize("has_left", [False, True])
def test_an_answer_whose_end_comes_after_the_client_has_left_is_not_whole(has_left: bool) -> None:
    async def send(message: object) -> None: ...

    async def answer() -> _Sending:
        sending = _Sending(send)
        sending.leaving = asyncio.get_running_loop().create_future()
        await sending({"type": "http.response.start", "status": 200})
        await sending({"type": "http.response.body", "body": b"x", "more_body": True})
        assert not sending.is_whole
        if has_left:
            sending.leaving.set_result(None)
        await sending({"type": "http.response.body"})
        return sending

    assert asyncio.run(answer()).is_whole is not has_left


def test_routes_with_a_name_in_them_match_one_part_of_a_path() -> None:
    door = Door({"/v1/models": "GET", "/v1/models/{model}": "GET"}, 1, Metrics(()))
    assert door.find("/v1/models") == ("/v1/models", "GET")
    assert door.find("/v1/models/a.b") == ("/v1/models/{model}", "GET")
    for path in ("/v1/models/", "/v1/models/a/b", "/v1/modelsx", "/v1/models/a/"):
        assert door.find(path) is None
