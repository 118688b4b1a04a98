"""/v1/embeddings: what its body asks of the engine, and the answer of what the engine gives.

Reads `serve.requests`, `serve.prompts`, `serve.errors`, `serve.served`, `infer.request` and `errors`; the endpoints call it.
Fields are OpenAI's, with our `timeout_s` and `service_tier`.
"""

from __future__ import annotations

import base64
import struct
import uuid
from dataclasses import dataclass, field
from typing import Any

from jaxml.errors import RequestError
from jaxml.infer.request import LANES, Deadlines, Event, Lane, Request, Sampling
from jaxml.serve.errors import Reply, failure_of
from jaxml.serve.prompts import read_prompts
from jaxml.serve.requests import check_room, opened, read_deadlines, read_lane
from jaxml.serve.served import Served

EMBEDDING_FIELDS = ["model", "input", "encoding_format", "dimensions", "user", "service_tier", "timeout_s"]
FORMATS = ("float", "base64")


@dataclass(frozen=True)
class EmbeddingCall:
    """A request that can be right."""

    model: str
    inputs: tuple[tuple[int, ...], ...]
    encoding_format: str
    lane: Lane = "normal"
    deadlines: Deadlines = Deadlines()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.inputs))


def parse_embeddings(body: Any, served: Served, lanes: tuple[Lane, ...] = LANES) -> EmbeddingCall:
    """The call that a body asks for. Raises RequestError with every fault, also for a model that makes no embeddings."""
    fields = opened(body, served)
    if not served.has_embeddings:
        expected, todo = "a model that makes embeddings", "ask it for completions, or serve another"
        raise RequestError("model", expected=expected, got=f"{served.name!r}, which does not", todo=todo)
    fields.refuse_others(EMBEDDING_FIELDS, {})
    given = fields.values.get("encoding_format")
    encoding = "float" if given is None else given
    if encoding not in FORMATS:
        fields.wrong("encoding_format", " or ".join(FORMATS))
    dimensions = fields.integer("dimensions", 1)
    if dimensions is not None and dimensions != served.embedding_size:
        size = f", {served.embedding_size}" if served.embedding_size else ""
        fields.wrong("dimensions", f"nothing, or the size that this model's embeddings have{size}", "leave it out")
    inputs = read_prompts(fields, served.tokenizer, served.limits.inputs, "input")
    for name, ids in inputs:
        check_room(fields, name, ids, served)
    lane, _ = read_lane(fields, lanes)
    deadlines = read_deadlines(fields, served)
    fields.faults.raise_if_any()
    return EmbeddingCall(served.name, tuple(ids for _, ids in inputs), encoding, lane, deadlines)


@dataclass
class EmbeddingAnswer:
    """The answer to one call: `take` every event, then `reply`. `requests`: what to submit."""

    call: EmbeddingCall
    tenant: str = ""
    failure: Reply | None = None
    requests: list[Request] = field(init=False)
    _found: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        id, sampling = f"embd-{uuid.uuid4().hex}", Sampling(max_tokens=1)
        self.requests = [
            Request(
                f"{id}-{index}",
                ids,
                sampling,
                lane=self.call.lane,
                tenant=self.tenant,
                deadlines=self.call.deadlines,
                wants_embedding=True,
            )
            for index, ids in enumerate(self.call.inputs)
        ]

    @property
    def is_finished(self) -> bool:
        return self.failure is not None or len(self._found) == len(self.requests)

    def take(self, event: Event) -> None:
        if event.finish_reason == "error":
            self.failure = failure_of(event)
        elif event.finish_reason is not None:
            self._found[event.id] = event.embedding

    def reply(self) -> Reply:
        """The whole answer in the order of the inputs; the error instead, if one failed."""
        if self.failure is not None:
            return self.failure
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(self._found[request.id])}
            for index, request in enumerate(self.requests)
        ]
        usage = {"prompt_tokens": self.call.num_tokens, "total_tokens": self.call.num_tokens}
        return Reply(200, {"object": "list", "data": data, "model": self.call.model, "usage": usage})

    def _encoded(self, embedding: tuple[float, ...]) -> list[float] | str:
        """The numbers, or the base64 of little-endian float32 that OpenAI's client asks for."""
        if self.call.encoding_format == "float":
            return list(embedding)
        return base64.b64encode(struct.pack(f"<{len(embedding)}f", *embedding)).decode()
