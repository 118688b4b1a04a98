"""The official client against a running server: every endpoint, at once, in asyncio and streamed; each answer and each chunk
has the published shape; whatever is sent, nothing is a 500."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from jaxml.serve.openapi import describe
from tests.serve.openai_schema import Schemas
from tests.serve.servers import Server, small_server
from tests.serve.small_engine import CONTEXT_LENGTH, embedding_of

COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
PERSON = {"type": "object", "properties": {"name": {"const": "Ada"}, "age": {"type": "integer", "maximum": 9}}}
PERSON |= {"required": ["name", "age"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with small_server(tmp_path_factory.mktemp("conformance")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def schemas(assets: Path) -> Schemas:
    return Schemas(assets / "openai-openapi" / "openapi.subset.json")


ASKED: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": 2, "seed": 3},
    {"echo": True, "logprobs": 1},
    {"echo": True, "max_tokens": 0, "logprobs": 0},
    {"logit_bias": {"104": 5}, "stop": ["zz"], "temperature": 0.5, "top_p": 0.9, "user": "someone"},
    {"prompt": [[104, 105], [104]], "echo": True},
]


def documented(body: dict[str, Any]) -> dict[str, Any]:
    """Without the null that OpenAI's own answers have for the first token of an echo, which its document does not say."""
    for choice in body["choices"]:
        for key in ("token_logprobs", "top_logprobs"):
            values = (choice["logprobs"] or {}).get(key)
            if values and values[0] is None:
                del values[0]
    return body


@pytest.mark.parametrize("asked", ASKED)
def test_a_completion_has_the_published_shape_and_its_stream_says_the_same(
    asked: dict[str, Any], client: openai.OpenAI, schemas: Schemas
) -> None:
    body: dict[str, Any] = {"model": "small", "prompt": "hello", "max_tokens": 5, **asked}
    whole = client.completions.create(**body)
    assert schemas.faults("CreateCompletionResponse", documented(whole.to_dict())) == []
    texts, every = {choice.index: "" for choice in whole.choices}, []
    for chunk in client.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        every.append(chunk)
        faults = schemas.faults(
            "CreateCompletionResponse", documented(chunk.to_dict()), besides=["finish_reason", r"^\.usage"]
        )
        assert faults == []
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert every[-1].usage == whole.usage and every[-1].choices == []


def test_a_completion_in_asyncio(server: Server) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asked: dict[str, Any] = {"model": "small", "prompt": "hello", "max_tokens": 9, "seed": 2}
            whole, stream = await asyncio.gather(
                client.completions.create(**asked), client.completions.create(**asked, stream=True)
            )
            assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text
            embedded = await client.embeddings.create(model="small", input="hello")
            assert embedded.data[0].embedding == list(embedding_of(tuple(b"hello")))
            assert [model.id async for model in client.models.list()] == ["small"]

    asyncio.run(ask())


def test_the_first_token_of_a_stream_does_not_wait_for_the_others(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 300, "stream": True}
    _, content, _ = server.request("POST", COMPLETIONS, body)
    chunks = [json.loads(event[6:]) for event in content.decode().split("\n\n")[:-2]]
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert len("".join(texts)) == 300
    assert len(texts[0]) < 20 and len(texts) < 150, "the first at once, the rest by windows"


def test_what_was_cached_is_told(client: openai.OpenAI) -> None:
    usage = client.completions.create(model="small", prompt=["hello", "hi"], n=2, max_tokens=2).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (7, 2 + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_the_form_that_was_asked_for(client: openai.OpenAI, stream: bool) -> None:
    for more, check in (
        ({"response_format": FORM}, lambda text: jsonschema.validate(json.loads(text), PERSON)),
        ({"response_format": {"type": "json_object"}}, lambda text: json.loads(text).items()),
        ({"guided_choice": ["yes", "no"]}, ["yes", "no"].index),
        ({"guided_regex": "[0-9]{3}"}, int),
    ):
        made = client.completions.create(model="small", prompt="x", max_tokens=60, stream=stream, extra_body=more)
        choices = [chunk.choices[0] for chunk in made] if stream else made.choices
        check("".join(choice.text for choice in choices))
        assert choices[-1].finish_reason == "stop"


def test_a_form_that_does_not_compile_is_a_400_by_name(client: openai.OpenAI) -> None:
    for more in (
        {"guided_regex": "(a"},
        {"response_format": {**FORM, "json_schema": {"name": "x", "schema": {"not": {}}}}},
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="small", prompt="x", extra_body=more)
        assert refused.value.param in more


def test_lanes_deadlines_and_receipts_are_taken_and_told(client: openai.OpenAI) -> None:
    more = {"receipt": True, "timeout_s": 30, "service_tier": "flex"}
    made = client.completions.create(model="small", prompt="x", max_tokens=2, seed=7, extra_body=more).to_dict()
    assert (made["service_tier"], made["choices"][0]["receipt"]) == ("flex", {"seed": 7})


def test_embeddings_have_the_published_shape_in_both_encodings(
    client: openai.OpenAI, server: Server, schemas: Schemas
) -> None:
    inputs = ["hello", "hi"]
    expected = [list(embedding_of(tuple(text.encode()))) for text in inputs]
    made = client.embeddings.create(model="small", input=inputs, encoding_format="float", dimensions=4)
    assert schemas.faults("CreateEmbeddingResponse", made.to_dict()) == []
    assert [entry.embedding for entry in made.data] == expected
    # The client asks for base64 by itself, and reads it.
    assert [entry.embedding for entry in client.embeddings.create(model="small", input=inputs).data] == expected
    status, answer = server.post(EMBEDDINGS, {"input": "x", "dimensions": 5})
    assert status == 400 and answer["error"]["param"] == "dimensions"


def test_models_are_listed_and_found_by_name(client: openai.OpenAI, schemas: Schemas) -> None:
    listed, found = client.models.list(), client.models.retrieve("small")
    assert [model.to_dict() for model in listed.data] == [found.to_dict()]
    assert schemas.faults("Model", found.to_dict(), besides=[r"max_model_len"]) == []
    assert found.to_dict()["max_model_len"] == CONTEXT_LENGTH
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("other")
    assert missing.value.code == "model_not_found"


def test_tokens_go_out_and_back_on_both_paths(server: Server) -> None:
    for root in ("", "/v1"):
        status, told = server.post(f"{root}/tokenize", {"model": "small", "prompt": "hé"})
        assert (status, told["tokens"], told["count"]) == (200, [104, 195, 169], 3)
        assert server.post(f"{root}/detokenize", {"tokens": told["tokens"]}) == (200, {"prompt": "hé"})
        assert server.post(f"{root}/tokenize", {"prompt": 5})[1]["error"]["param"] == "prompt"
        assert server.post(f"{root}/detokenize", {"tokens": [999]})[0] == 400


def test_the_description_is_there(server: Server) -> None:
    status, told, _ = server.request("GET", "/openapi.json")
    assert (status, told) == (200, json.loads(json.dumps(describe())))


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", EMBEDDINGS, "/tokenize", "/detokenize"])
def test_nothing_that_is_sent_is_a_500(server: Server, schemas: Schemas, path: str) -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    texts = ["\ud800", "\x00", "a" * 1000]
    values = [None, 5, -(10**30), 1e308, True, [], {}, [[]], [deep], {"a": deep}, texts, *texts]
    for field in (
        "prompt",
        "messages",
        "input",
        "tokens",
        "stop",
        "tools",
        "response_format",
        "guided_choice",
        "model",
    ):
        for value in values:
            status, answer = server.post(path, {"max_tokens": 1, field: value})
            assert status in (200, 400, 404), (field, value, answer)
            if status != 200:
                assert schemas.faults("ErrorResponse", answer) == []
    for body in (None, [], "x", 5, deep):
        assert server.post(path, body if body is not None else b"null")[0] == 400
