"""What /v1/embeddings takes, and the shape of its answer."""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import openai.types
import pytest

from jaxml.infer.request import Deadlines, Event
from jaxml.serve.embeddings import EmbeddingAnswer, EmbeddingCall, parse_embeddings
from jaxml.serve.served import Limits
from tests.serve.asking import BYTES, CONTEXT, SUBWORD, model, refusal
from tests.serve.openai_schema import Schemas

VECTOR = (0.5, -0.25, 0.125)


def embeddings(**body: Any) -> EmbeddingCall:
    served = model(BYTES, has_embeddings=True, embedding_size=3, limits=Limits(inputs=3))
    return parse_embeddings({"input": "hello", **body}, served)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ab", [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 256]], [(97,), (98, 256)]),
    ],
)
def test_an_input_is_text_or_ids_one_or_many(given: Any, expected: list[tuple[int, ...]]) -> None:
    call = embeddings(input=given)
    assert list(call.inputs) == expected and call.num_tokens == sum(map(len, expected))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": ["a"] * 4}, "input"),
        ({"input": [1] * CONTEXT}, "input"),
        ({"input": ["a", "\ud800"]}, "input[1]"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"encoding_format": []}, "encoding_format"),
        ({"dimensions": 2}, "dimensions"),
        ({"dimensions": "3"}, "dimensions"),
        ({"user": 5}, "user"),
        ({"service_tier": "x"}, "service_tier"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"temperature": 0}, "temperature"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_wrong_is_refused_by_name(body: Any, field: str) -> None:
    assert refusal(embeddings, **body)[0] == field


def test_the_size_may_be_named_where_it_is_what_it_is() -> None:
    assert embeddings(dimensions=3, user="someone", encoding_format="float") == embeddings()


def test_a_model_that_makes_none_says_so() -> None:
    field, said = refusal(parse_embeddings, {"input": "a"}, model(SUBWORD))
    assert field == "model" and "makes embeddings" in said


def test_each_input_is_a_request_in_its_lane_with_its_deadline() -> None:
    call = embeddings(input=["a", "b"], service_tier="flex", timeout_s=5)
    requests = EmbeddingAnswer(call, "a tenant").requests
    assert all(request.wants_embedding and request.tenant == "a tenant" for request in requests)
    assert {request.lane for request in requests} == {"batch"}
    assert {request.deadlines for request in requests} == {Deadlines(total_s=5.0)}
    assert len({request.id for request in requests}) == 2


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_an_answer_has_the_published_shape_in_the_order_of_the_inputs(encoding: str, assets: Path) -> None:
    answer = EmbeddingAnswer(embeddings(input=["a", "bc"], encoding_format=encoding))
    for number, request in reversed(list(enumerate(answer.requests))):
        assert not answer.is_finished
        vector = tuple(value + number for value in VECTOR)
        answer.take(Event(request.id, finish_reason="stop", embedding=vector))
    body = answer.reply().body
    openai.types.CreateEmbeddingResponse.model_validate(body) if encoding == "float" else None
    if encoding == "float":
        schemas = Schemas(assets / "openai-openapi" / "openapi.subset.json")
        assert schemas.faults("CreateEmbeddingResponse", body) == []
    else:
        for entry in body["data"]:
            entry["embedding"] = list(struct.unpack("<3f", base64.b64decode(entry["embedding"])))
    assert [entry["embedding"] for entry in body["data"]] == [list(VECTOR), [value + 1 for value in VECTOR]]
    assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_one_input_that_fails_makes_the_whole_answer_an_error() -> None:
    answer = EmbeddingAnswer(embeddings(input=["a", "b"]))
    answer.take(Event(answer.requests[0].id, finish_reason="stop", embedding=VECTOR))
    answer.take(Event(answer.requests[1].id, finish_reason="error", error="deadline", detail="secret"))
    reply = answer.reply()
    assert answer.is_finished and reply.status == 504 and "secret" not in str(reply.body)
