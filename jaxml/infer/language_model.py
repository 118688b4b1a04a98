"""Text in, text out: a language model for scripts, one prompt or many, whole or streamed.

Reads `infer.decoding_model`, `infer.scheduler`, `infer.runner` and `infer.opening`; the command line, evaluation and
scripts use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from jaxml.errors import NonFiniteError
from jaxml.infer.beam import beam_search
from jaxml.infer.decoding_model import DecodingModel, Prompt
from jaxml.infer.opening import Opened, open_checkpoint
from jaxml.infer.progress import Progress
from jaxml.infer.request import Event, FinishReason, Request, Sampling, TokenLogprob
from jaxml.infer.runner import PAGE_SIZE, FastRunner
from jaxml.infer.scheduler import Scheduler
from jaxml.infer.text import TextStream
from jaxml.inputs.tokenizers import Tokenizer

MAX_ROWS = 8
MIN_PAGES = 64


@dataclass(frozen=True)
class Completion:
    """An answer. `tokens` are without the one that stopped it, if one did; `text` is without the stop string."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    num_prompt_tokens: int


class LanguageModel(DecodingModel):
    """A model that generates. `LanguageModel.open("runs/a").generate("To be", max_tokens=20).text`"""

    def __init__(self, opened: Opened):
        super().__init__(opened)
        self._idle_runners: dict[int, list[FastRunner]] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> LanguageModel:
        """The model of a run, checkpoints or step directory. Raises CheckpointError (see `open_checkpoint`)."""
        return cls(open_checkpoint(path))

    @overload
    def generate(self, prompts: str, sampling: Sampling | None = None, **fields: Any) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, **fields: Any
    ) -> list[Completion]: ...
    def generate(self, prompts: Any, sampling: Sampling | None = None, **fields: Any) -> Any:
        """The answer to a text, or the answers to several prompts (texts or token ids), decoded together.

        `fields` change those of `sampling` (or of the defaults): `generate("To be", max_tokens=20, temperature=0)`.
        Raises RequestError: a prompt that does not fit, a sampling value out of range.
        """
        every = [prompts] if isinstance(prompts, str) else list(prompts)
        sampling = dataclasses.replace(sampling or Sampling(), **fields)
        requests = [Request(str(index), self.encode(prompt), sampling) for index, prompt in enumerate(every)]
        events: dict[str, list[Event]] = {request.id: [] for request in requests}
        for event in self._run(requests):
            events[event.id].append(event)
        answers = [_completion(request, events[request.id]) for request in requests]
        return answers[0] if isinstance(prompts, str) else answers

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, **fields: Any) -> Iterator[Event]:
        """The same for one prompt, as it comes: events whose texts are the answer."""
        sampling = dataclasses.replace(sampling or Sampling(), **fields)
        return self._run([Request("0", self.encode(prompt), sampling)], target_s=0.05)

    def beam_search(
        self, prompt: Prompt, *, num_beams: int = 4, max_tokens: int | None = None, length_penalty: float = 1.0
    ) -> list[Completion]:
        """The best answers that a beam of `num_beams` finds, best first; their score is the sum of log-probabilities by
        (number of tokens) ** length_penalty. Raises RequestError where `beam.beam_search` does."""
        ids = self.encode(prompt)
        found = beam_search(self, ids, num_beams=num_beams, max_tokens=max_tokens, length_penalty=length_penalty)
        return [
            Completion(self._text(ids, hypothesis.tokens), hypothesis.tokens, hypothesis.finish_reason, (), len(ids))
            for hypothesis in found
        ]

    def _text(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        stream = TextStream(self.tokenizer, prompt, ())
        return stream.push(tokens) + stream.flush()

    def _run(self, requests: list[Request], target_s: float = 1.0) -> Iterator[Event]:
        """The events of requests that run together, until the last one ends."""
        progress = [
            Progress(request, self._tokenizer_of(request), self.eos, self.limit(request)) for request in requests
        ]
        sizes = sorted(-(-(len(each.request.prompt) + each.max_tokens) // PAGE_SIZE) for each in progress)
        with self._borrowed_runner(sum(sizes[-MAX_ROWS:]), target_s) as runner:
            scheduler = Scheduler(runner)
            for request, each in zip(requests, progress, strict=True):
                scheduler.add(request, each, 0.0)
            while scheduler.is_busy:
                spans, num_steps, _ = scheduler.plan(0.0)
                yield from scheduler.take(spans, runner.run(spans, num_steps))

    def _tokenizer_of(self, request: Request) -> Tokenizer | None:
        request.sampling.checked(self.vocab_size)
        return self.opened.require_tokenizer() if request.sampling.stop else self.tokenizer

    @contextlib.contextmanager
    def _borrowed_runner(self, num_pages: int, target_s: float) -> Iterator[FastRunner]:
        """A runner with so many pages or more, for one call alone; those that are idle keep their compiled programs."""
        num_pages = max(MIN_PAGES, 2 ** (num_pages - 1).bit_length())
        idle = self._idle_runners.setdefault(num_pages, [])
        runner = idle.pop() if idle else FastRunner(self, max_rows=MAX_ROWS, num_pages=num_pages)
        runner.target_s = target_s
        try:
            yield runner
        finally:
            idle.append(runner)


def _completion(request: Request, events: list[Event]) -> Completion:
    reason = events[-1].finish_reason
    assert reason is not None
    if reason == "error":
        raise NonFiniteError(
            "an answer of the model",
            expected="finite logits",
            got=events[-1].detail,
            todo="see whether its training diverged: `jaxml inspect` shows the metrics of the checkpoint",
        )
    return Completion(
        text="".join(event.text for event in events),
        tokens=tuple(token for event in events for token in event.tokens),
        finish_reason=reason,
        logprobs=tuple(item for event in events for item in event.logprobs),
        num_prompt_tokens=len(request.prompt),
    )
