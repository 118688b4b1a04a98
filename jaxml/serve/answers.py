"""What clients get, in the shapes of OpenAI's API: whole answers, and the chunks of a stream.

Reads `serve.errors`, `serve.requests`, `serve.token_names`, `infer.request`, `infer.text` and `inputs.tokenizers`; the
endpoints send what it makes. No HTTP and no jax: dicts that JSON can hold (every number is finite, no text has half a
character).
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from jaxml.infer.request import Event, TokenLogprob
from jaxml.infer.text import TextStream
from jaxml.inputs.tokenizers import Tokenizer
from jaxml.serve.errors import Reply, failure_of
from jaxml.serve.requests import CompletionCall
from jaxml.serve.token_names import TokenNames, finite

DONE = b"data: [DONE]\n\n"


def sse(value: dict[str, Any]) -> bytes:
    """One server-sent event. `DONE` ends a stream."""
    return b"data: " + json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n\n"


@dataclass(frozen=True)
class Scored:
    """A token that is told with its log-probability (None: the first of an echoed prompt has none) and its place."""

    token: int
    logprob: TokenLogprob | None
    offset: int


@dataclass
class Progress:
    """One choice: what has come and was not yet given out. `offsets` follows the text for the places of tokens in it."""

    index: int
    offsets: TextStream
    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    num_characters: int = 0
    num_tokens: int = 0
    num_cached: int = 0
    finish_reason: str | None = None
    receipt: dict[str, Any] | None = None
    has_begun: bool = False
    is_told: bool = False


class Answer:
    """The answer to one call, made of the engine's events.

    `take` every event. Streamed: `opening()` first, `chunks()` whenever something should go out, `closing()` at the end;
    each returns the JSON of the events to send, which `sse` writes, and `DONE` follows. Whole: `reply()` at the end.
    `fail` ends either one early. What came since the last `chunks()` goes out as one chunk for each choice.
    `id`, `created`: the same in every chunk. `requests`: what to submit. `failure`: what went wrong, if anything did.
    """

    def __init__(
        self, call: CompletionCall, tokenizer: Tokenizer, id: str = "", created: int | None = None, tenant: str = ""
    ):
        self.call = call
        self.id = id or ("chatcmpl-" if call.is_chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time()) if created is None else created
        self.requests = call.requests(self.id, tenant)
        self.failure: Reply | None = None
        self._is_failure_told = False
        self._tokenizer = tokenizer
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

    def take(self, event: Event) -> None:
        """One more event of the engine. One that has failed ends the answer."""
        progress = self._progress[event.id]
        if event.finish_reason == "error":
            self.fail(failure_of(event))
            return
        if not progress.has_begun:
            self._begin(progress, event)
        if self.call.wants_answer:
            progress.text += event.text
            progress.num_tokens = event.num_tokens
            for logprob in event.logprobs:
                self._score(progress, logprob.token, logprob)
        if event.finish_reason is not None:
            progress.finish_reason = event.finish_reason if self.call.wants_answer else "length"
            progress.receipt = event.receipt

    def fail(self, failure: Reply) -> None:
        """The end of an answer that cannot go on: every choice that is open ends with "error"."""
        self.failure = self.failure or failure
        for progress in self._progress.values():
            progress.finish_reason = progress.finish_reason or "error"

    def chunks(self) -> list[dict[str, Any]]:
        """What is new, as the next chunks of a stream; none while that is nothing (tokens whose text is still pending).

        The last chunk of a choice has its finish_reason and nothing to read; log-probabilities go out with the next text.
        """
        found = []
        for progress in self._progress.values():
            if progress.text or (progress.scored and progress.finish_reason):
                text = {"delta": {"content": progress.text}} if self.call.is_chat else {"text": progress.text}
                found.append(self._chunk(progress, text, self._logprobs(progress)))
                progress.text, progress.scored = "", []
        if self.failure is not None and not self._is_failure_told:
            self._is_failure_told = True
            found.append(self.failure.body)
        for progress in self._progress.values():
            if progress.finish_reason and not progress.is_told:
                progress.is_told = True
                nothing = {"delta": {}} if self.call.is_chat else {"text": ""}
                found.append(self._chunk(progress, nothing, finish_reason=progress.finish_reason))
        return found

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

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts and, so far, of the answers."""
        return self.call.num_prompt_tokens + sum(progress.num_tokens for progress in self._progress.values())

    def usage(self) -> dict[str, Any]:
        """Counts of tokens: each prompt once, every choice's answer. cached_tokens: of the prompts, as the first choice
        of each found them."""
        prompt, total = self.call.num_prompt_tokens, self.num_tokens
        cached = sum(p.num_cached for p in self._progress.values() if p.index % self.call.n == 0)
        counts = {"prompt_tokens": prompt, "completion_tokens": total - prompt, "total_tokens": total}
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    def _begin(self, progress: Progress, event: Event) -> None:
        """The prompt, where it is to be told, as the tokenizer writes it: what the model has read."""
        progress.has_begun, progress.num_cached = True, event.num_cached
        if not self.call.echo:
            return
        answering, progress.offsets = progress.offsets, TextStream(self._tokenizer, (), ())
        prompt = self.call.choices[progress.index].prompt
        logprobs: list[TokenLogprob | None] = [None, *event.prompt_logprobs]
        if len(logprobs) == len(prompt):
            for token, logprob in zip(prompt, logprobs, strict=True):
                self._score(progress, token, logprob)
        whole = TextStream(self._tokenizer, (), ())
        progress.text = whole.push(prompt) + whole.flush()
        progress.offsets, progress.num_characters = answering, len(progress.text)

    def _score(self, progress: Progress, token: int, logprob: TokenLogprob | None) -> None:
        if self.call.choices[progress.index].sampling.num_logprobs is not None:
            progress.scored.append(Scored(token, logprob, progress.num_characters))
            progress.num_characters += len(progress.offsets.push([token]))

    def _chunk(
        self, progress: Progress, text: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return self._body(chunk=True, choices=[self._choice(progress, text, logprobs, finish_reason)], usage=None)

    def _choice(
        self, progress: Progress, text: dict[str, Any], logprobs: Any, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": progress.index, **text, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**choice, "receipt": progress.receipt} if finish_reason and progress.receipt is not None else choice

    def _body(self, *, chunk: bool, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        kind = "text_completion"
        if self.call.is_chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        body = {"id": self.id, "object": kind, "created": self.created, "model": self.call.model, "choices": choices}
        if self.call.service_tier is not None:
            body["service_tier"] = self.call.service_tier
        return {**body, "usage": usage} if self.call.include_usage or not chunk else body

    def _logprobs(self, progress: Progress) -> dict[str, Any] | None:
        """The log-probabilities of the tokens that have come, in the form of the endpoint; None if not asked for."""
        if self.call.choices[progress.index].sampling.num_logprobs is None:
            return None
        if self.call.is_chat:
            told = [scored.logprob for scored in progress.scored if scored.logprob is not None]
            content = [
                {**self._token(item.token, item.logprob), "top_logprobs": [self._token(*other) for other in item.top]}
                for item in told
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._names[item.token][0] for item in progress.scored],
            "token_logprobs": [item.logprob and finite(item.logprob.logprob) for item in progress.scored],
            "top_logprobs": [item.logprob and self._by_name(item.logprob) for item in progress.scored],
            "text_offset": [item.offset for item in progress.scored],
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
