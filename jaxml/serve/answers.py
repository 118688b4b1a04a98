"""What clients get, in the shapes of OpenAI's API: whole answers, the chunks of a stream, errors.

Reads `serve.requests`, `infer.request`, `infer.text`, `inputs.tokenizers` and `errors`; the endpoints and the gate send
what it makes. No HTTP and no jax: dicts that JSON can hold (every number is finite, no text has half a character).
"""

from __future__ import annotations

import json
import math
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from jaxml.errors import JaxmlError, QueueFullError, RequestError
from jaxml.infer.request import Event, TokenLogprob
from jaxml.infer.text import TextStream, token_text
from jaxml.inputs.tokenizers import Tokenizer
from jaxml.serve.requests import CompletionCall, UnknownModelError

DONE = b"data: [DONE]\n\n"
RETRY_AFTER_S = 1
# JSON has no infinity, and a masked token's log-probability is minus infinity. OpenAI documents this floor.
LEAST_LOGPROB = -9999.0
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
INTERNAL = "the server failed to answer; its log says where"


@dataclass(frozen=True)
class Reply:
    """An HTTP answer: status, JSON body, headers."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def sse(value: dict[str, Any]) -> bytes:
    """One server-sent event. `DONE` ends a stream."""
    return b"data: " + json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n\n"


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it. `param` names the field that is wrong, `code` the kind of error."""
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_reply(error: Exception) -> Reply:
    """The answer that tells a client of an error. What is not its own fault is told without any of the inside."""
    if isinstance(error, UnknownModelError):
        return Reply(404, error_object(404, told(error), "model", "model_not_found"))
    if isinstance(error, RequestError):
        return Reply(400, error_object(400, told(error), error.faults[0].failed))
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return Reply(429, error_object(429, told(error), code="queue_full"), headers)
    return Reply(500, error_object(500, INTERNAL, code="internal_error"))


def told(error: JaxmlError) -> str:
    """All faults of an error in one line."""
    faults = [f"{fault.failed}: expected {fault.expected}, got {fault.got}; {fault.todo}" for fault in error.faults]
    if len(faults) == 1:
        return faults[0]
    return f"{len(faults)} faults. " + " ".join(f"({number}) {fault}." for number, fault in enumerate(faults, 1))


class TokenNames:
    """Tokens as texts: what they write, special ones as they are spelt out, parts of characters as bytes."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def __getitem__(self, token: int) -> tuple[str, list[int] | None]:
        """(name, UTF-8 bytes; None for a special token). Names are distinct where the texts are."""
        if token not in self._known:
            self._known[token] = self._name(token)
        return self._known[token]

    def _name(self, token: int) -> tuple[str, list[int] | None]:
        if token in self._tokenizer.special_tokens:
            return self._tokenizer.special_tokens[token], None
        written = token_text(self._tokenizer, token)
        try:
            return written.decode("utf-8"), list(written)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written), list(written)


@dataclass
class Progress:
    """One choice: what has come and was not yet given out. `offsets` follows the text for the places of tokens in it."""

    index: int
    offsets: TextStream
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_characters: int = 0
    num_tokens: int = 0
    finish_reason: str | None = None


class Answer:
    """The answer to one call, made of the engine's events.

    Streamed: `opening()`, `take(event)` for each event, `closing()`; each returns the JSON of the events to send, which
    `sse` writes, and `DONE` follows. Whole: `take` every event, then `reply()`. `fail` ends either one early.
    `id`, `created`: the same in every chunk. `requests`: what to submit. `failure`: what went wrong, if anything did.
    """

    def __init__(self, call: CompletionCall, tokenizer: Tokenizer, id: str = "", created: int | None = None):
        self.call = call
        self.id = id or ("chatcmpl-" if call.is_chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time()) if created is None else created
        self.requests = call.requests(self.id)
        self.failure: Reply | None = None
        self._names = TokenNames(tokenizer)
        self._progress = {
            request.id: Progress(index, TextStream(tokenizer, request.prompt, ()))
            for index, request in enumerate(self.requests)
        }

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended, well or not."""
        return all(progress.finish_reason is not None for progress in self._progress.values())

    def opening(self) -> list[dict[str, Any]]:
        """The first chunks of a stream: in a chat they say who speaks, once for each choice."""
        if not self.call.is_chat:
            return []
        return [self._chunk(p, {"delta": {"role": "assistant", "content": ""}}) for p in self._progress.values()]

    def take(self, event: Event) -> list[dict[str, Any]]:
        """The chunks that an event makes; none while it says nothing new (tokens whose text is still pending).

        The last chunk of a choice has its finish_reason and nothing else; log-probabilities go out with the next text.
        """
        progress = self._progress[event.id]
        progress.text += event.text
        progress.logprobs += event.logprobs
        progress.num_tokens = event.num_tokens
        if event.finish_reason == "error":
            return self.fail(Reply(500, error_object(500, INTERNAL, code="internal_error")))
        progress.finish_reason = event.finish_reason
        if not self.call.stream:
            return []
        chunks = []
        if progress.text or (progress.logprobs and progress.finish_reason):
            text = {"delta": {"content": progress.text}} if self.call.is_chat else {"text": progress.text}
            chunks.append(self._chunk(progress, text, self._logprobs(progress)))
            progress.text, progress.logprobs = "", []
        if progress.finish_reason:
            nothing = {"delta": {}} if self.call.is_chat else {"text": ""}
            chunks.append(self._chunk(progress, nothing, finish_reason=progress.finish_reason))
        return chunks

    def fail(self, failure: Reply) -> list[dict[str, Any]]:
        """The end of a stream that cannot go on: an error, and finish_reason "error" for each choice that is open."""
        self.failure = failure
        chunks = [failure.body]
        for progress in self._progress.values():
            if progress.finish_reason is None:
                progress.finish_reason = "error"
                nothing = {"delta": {}} if self.call.is_chat else {"text": ""}
                chunks.append(self._chunk(progress, nothing, finish_reason="error"))
        return chunks

    def closing(self) -> list[dict[str, Any]]:
        """The last chunk of a stream that was asked to count tokens; it has no choices."""
        return [self._body(chunk=True, choices=[], usage=self.usage())] if self.call.include_usage else []

    def reply(self) -> Reply:
        """The whole answer, once every choice has ended; the error instead, if one failed."""
        if self.failure is not None:
            return self.failure
        assert self.is_finished, "an answer is whole when each of its choices has ended"
        choices = []
        for progress in self._progress.values():
            content = {"role": "assistant", "content": progress.text, "refusal": None}
            text = {"message": content} if self.call.is_chat else {"text": progress.text}
            choices.append(self._choice(progress, text, self._logprobs(progress), progress.finish_reason))
        return Reply(200, self._body(chunk=False, choices=choices, usage=self.usage()))

    def usage(self) -> dict[str, int]:
        """Counts of tokens: each prompt once, every choice's answer."""
        prompt, answer = self.call.num_prompt_tokens, sum(p.num_tokens for p in self._progress.values())
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def _chunk(
        self, progress: Progress, text: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return self._body(chunk=True, choices=[self._choice(progress, text, logprobs, finish_reason)], usage=None)

    def _choice(
        self, progress: Progress, text: dict[str, Any], logprobs: Any, finish_reason: str | None
    ) -> dict[str, Any]:
        return {"index": progress.index, **text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _body(self, *, chunk: bool, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> dict[str, Any]:
        kind = "text_completion"
        if self.call.is_chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        body = {"id": self.id, "object": kind, "created": self.created, "model": self.call.model, "choices": choices}
        return {**body, "usage": usage} if self.call.include_usage or not chunk else body

    def _logprobs(self, progress: Progress) -> dict[str, Any] | None:
        """The log-probabilities of the tokens that have come, in the form of the endpoint; None if not asked for."""
        if self.call.choices[progress.index].sampling.num_logprobs is None:
            return None
        if self.call.is_chat:
            content = [
                {**self._token(item.token, item.logprob), "top_logprobs": [self._token(*other) for other in item.top]}
                for item in progress.logprobs
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for item in progress.logprobs:
            offsets.append(progress.num_characters)
            progress.num_characters += len(progress.offsets.push([item.token]))
        return {
            "tokens": [self._names[item.token][0] for item in progress.logprobs],
            "token_logprobs": [finite(item.logprob) for item in progress.logprobs],
            "top_logprobs": [self._by_name(item) for item in progress.logprobs],
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        name, written = self._names[token]
        return {"token": name, "logprob": finite(logprob), "bytes": written}

    def _by_name(self, item: TokenLogprob) -> dict[str, float]:
        """The most likely tokens and the chosen one by name; of several with one name, the likeliest."""
        found: dict[str, float] = {}
        for token, logprob in (*item.top, (item.token, item.logprob)):
            found.setdefault(self._names[token][0], finite(logprob))
        return found


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold: from LEAST_LOGPROB to 0."""
    return LEAST_LOGPROB if math.isnan(logprob) else min(0.0, max(LEAST_LOGPROB, logprob))
