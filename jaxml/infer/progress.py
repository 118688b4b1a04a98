"""One answer while it grows: tokens to text, where it ends and why, log-probabilities. On the host, without jax.

Reads `infer.request` and `infer.text`; `infer.scheduler` keeps one for each request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxml.infer.request import Event, FinishReason, Request, TokenLogprob
from jaxml.infer.text import TextStream
from jaxml.infer.work import Outcome
from jaxml.inputs.tokenizers import Tokenizer


class Progress:
    """The answer to a request, of at most `max_tokens` tokens. `eos`: tokens that end it unless the request ignores them.

    A tokenizer of None gives no text. `num_tokens`: those so far, the one that stopped it among them.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, eos: Sequence[int], max_tokens: int):
        self.request, self.max_tokens = request, max_tokens
        self.num_tokens = 0
        self._stop_tokens = {*request.sampling.stop_token_ids, *(() if request.sampling.ignore_eos else eos)}
        self._text = None if tokenizer is None else TextStream(tokenizer, request.prompt, request.sampling.stop)

    def take(self, outcome: Outcome, is_complete: bool = False) -> Event:
        """What newly drawn tokens mean. is_complete: nothing can follow them (a constraint is satisfied)."""
        tokens = list(outcome.tokens)
        self.num_tokens += len(tokens)
        reason: FinishReason | None = None
        if tokens and tokens[-1] in self._stop_tokens:
            reason = "stop"
            tokens.pop()
        elif is_complete:
            reason = "stop"
        elif self.num_tokens >= self.max_tokens:
            reason = "length"
        text = ""
        if self._text is not None:
            before = self._text.num_tokens_used
            text = self._text.push(tokens)
            if self._text.stopped:
                dropped = len(tokens) - (self._text.num_tokens_used - before)
                tokens = tokens[: len(tokens) - dropped]
                self.num_tokens -= dropped + (reason == "stop" and not is_complete)
                reason = "stop"
            elif reason is not None:
                text += self._text.flush()  # which may complete a stop string
                reason = "stop" if self._text.stopped else reason
        wanted = self.request.sampling.num_logprobs
        logprobs = () if wanted is None else logprobs_of(tokens, outcome, wanted)
        return Event(self.request.id, tuple(tokens), text, logprobs, reason, self.num_tokens)


def logprobs_of(tokens: Sequence[int], outcome: Outcome, num_top: int) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of the first tokens of an outcome, and of the `num_top` most likely ones at their places."""
    found = []
    for place, token in enumerate(tokens):
        top = zip(outcome.top_tokens[place, :num_top], outcome.top_logprobs[place, :num_top], strict=True)
        pairs = tuple((int(other), float(value)) for other, value in top if np.isfinite(value))
        found.append(TokenLogprob(token, float(outcome.logprobs[place]), pairs))
    return tuple(found)
