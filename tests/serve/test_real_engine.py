"""`jaxml serve` of a language model's checkpoint: what is served is what the model says, and serving trains nothing."""

from __future__ import annotations

import concurrent.futures
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxml.infer.language_model import LanguageModel
from tests.infer.written import write_language_model
from tests.serve.servers import CACHE, ROOT, Server, free_port, jaxml_serve, running

COMPLETIONS = "/v1/completions"
PROMPTS = [f"{'Shall I ' * (1 + number)}{number}?" for number in range(8)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    command = [str(ROOT / "tests" / "serve" / "serve_watched.py"), str(checkpoint), str(port), str(CACHE)]
    with running(command, port, tmp_path_factory.mktemp("log") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_gets_what_the_model_says(client: openai.OpenAI, checkpoint: Path) -> None:
    asked: dict[str, Any] = {"model": "small", "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=2)
    expected = LanguageModel.open(checkpoint).generate(PROMPTS[0], max_tokens=24, temperature=0.0)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected.text, expected.finish_reason)
    assert whole.usage is not None and whole.usage.prompt_tokens == expected.num_prompt_tokens
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.token_logprobs is not None
    assert all(value <= 0 for value in whole.choices[0].logprobs.token_logprobs)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 7}], ids=["greedy", "seeded"])
def test_answers_given_at_the_same_time_are_those_given_alone(server: Server, sampling: dict[str, Any]) -> None:
    def ask(prompt: str) -> Any:
        status, answer = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 40, **sampling})
        assert status == 200, answer
        return answer["choices"]

    alone = [ask(prompt) for prompt in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, PROMPTS)) == alone
    assert len({choices[0]["text"] for choices in alone}) > len(PROMPTS) // 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_clients_that_leave_free_their_places_and_neighbours_do_not_notice(server: Server, stream: bool) -> None:
    alone = server.post(COMPLETIONS, {"prompt": "To be", "max_tokens": 100, "temperature": 0})
    body = {"prompt": "x" * 150, "max_tokens": 100, "n": 6, "stream": stream, "temperature": 1}
    for _ in range(4):
        leaving = server.open_request(COMPLETIONS, body)
        again = server.open_request(COMPLETIONS, {"prompt": "To be", "max_tokens": 100, "temperature": 0})
        leaving.close()
        again.settimeout(20)
        content = b""
        while not content.endswith(b"}"):
            content += again.recv(65536)
        assert json.loads(content.partition(b"\r\n\r\n")[2])["choices"] == alone[1]["choices"]
    server.settled(running=0, queued=0, free_places=2)


def test_serving_has_imported_nothing_of_training(server: Server) -> None:
    assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2})[0] == 200
    assert server.stats()["training_modules"] == 0


def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="256"):
        client.completions.create(model="small", prompt="x" * 256)
    longest = client.completions.create(model="small", prompt="x" * 255, max_tokens=50)
    assert longest.usage is not None and longest.usage.completion_tokens == 1
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="small", prompt=[300])
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="small", prompt="")


def test_it_drains_and_stops(server: Server) -> None:
    running_one = server.open_request(COMPLETIONS, {"prompt": ["x", "y", "z"], "n": 16, "max_tokens": 200})
    server.settled(running=2)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0
    assert b"200 OK" in running_one.recv(1000)


def test_a_model_that_does_not_give_the_sealed_logits_is_not_served(tmp_path: Path) -> None:
    """The arrays of another model, of the same shapes, under a sealed manifest."""
    checkpoint = write_language_model(tmp_path / "a")
    other = write_language_model(tmp_path / "b", scale=2.0)
    (checkpoint / "1" / "params").rename(tmp_path / "gone")
    (other / "1" / "params").rename(checkpoint / "1" / "params")
    port = free_port()
    with running(jaxml_serve(str(checkpoint), "--port", str(port)), port, tmp_path / "log", is_ready=False) as server:
        assert server.wait_end(60) == 1
        said = server.said()
        assert said.count("logits of the probe") == 1 and "Traceback" not in said, said
        for part in ("expected:", "got:", "to do:"):
            assert part in said
