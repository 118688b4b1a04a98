"""The loss of a language model on a text: nats a token, perplexity and bits per byte, every token counted exactly once.

Reads `infer.scoring` and `inputs.tokenizers`; `cli.eval` reads it. The loss on the data that a run held out is
`recipes.held_out`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jaxml.errors import RequestError
from jaxml.infer.opening import Opened
from jaxml.infer.scoring import language_model_spec, score
from jaxml.infer.text import encode_prompt
from jaxml.inputs.tokenizers import Tokenizer

WINDOWS_PER_CALL = 256  # windows that are cut, scored and added up together


@dataclass(frozen=True)
class TextLoss:
    """`nats`: minus the log-probability of the `num_tokens` counted tokens, which write `num_bytes` bytes of UTF-8."""

    nats: float
    num_tokens: int
    num_bytes: int
    num_windows: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """e ** loss (infinite beyond e ** 700)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of text, which does not depend on the tokenizer; NaN where the tokens write nothing."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else math.nan


@dataclass(frozen=True)
class Window:
    """Inputs are the tokens from `start` to `end` (without it), the last of which is only predicted; those from
    `counted_from` on are counted."""

    start: int
    end: int
    counted_from: int


def evaluate_text(opened: Opened, text: str, stride: int | None = None) -> TextLoss:
    """The loss on a text of any length.

    The token that begins a text, where the tokenizer has one, stands in front of it and is not counted; then every token
    of the text is. Without it the first token has nothing before it, so neither it nor its bytes are counted. No token
    that ends a text is added. A text that is longer than the context is cut into `windows`, `stride` tokens apart (default:
    half the context). Raises RequestError: nothing to count, a stride out of range, text that the tokenizer cannot write.
    """
    spec = language_model_spec(opened)
    tokenizer = opened.require_tokenizer()
    ids = np.asarray(encode_prompt(tokenizer, text), np.int64)
    if len(ids) < 2:
        got = f"{len(text)} characters, {len(ids)} tokens"
        expected = "a text with a token that has another one before it"
        raise RequestError("the text to evaluate", expected=expected, got=got, todo="give a longer text")
    if stride is None:
        stride = max(1, spec.context_length // 2)
    cut = windows(len(ids), spec.context_length, stride)
    nats = 0.0
    for first in range(0, len(cut), WINDOWS_PER_CALL):
        group = cut[first : first + WINDOWS_PER_CALL]
        for window, logprobs in zip(group, score(opened, [ids[w.start : w.end] for w in group]), strict=True):
            nats -= float(logprobs[window.counted_from - window.start - 1 :].sum(dtype=np.float64))
    num_bytes = len(text.encode()) - (0 if tokenizer.bos_id is not None else _num_bytes(tokenizer, int(ids[0])))
    return TextLoss(nats, len(ids) - 1, num_bytes, len(cut))


def windows(num_tokens: int, context_length: int, stride: int) -> list[Window]:
    """Cuts tokens 0 to num_tokens - 1 so that each but the first is counted in exactly one window.

    Windows begin `stride` tokens apart and predict `context_length` tokens each; of the second and later ones only those
    that the one before did not predict are counted, so that a counted token has at least context_length - stride + 1
    tokens before it (or all that there are). Raises RequestError for a stride outside 1 to `context_length`.

    >>> windows(7, 4, 2)
    [Window(start=0, end=5, counted_from=1), Window(start=2, end=7, counted_from=5)]
    """
    if not 1 <= stride <= context_length:
        expected = f"from 1 to the context of {context_length} tokens"
        raise RequestError("stride", expected=expected, got=str(stride), todo="half the context is usual")
    found = [Window(0, min(context_length + 1, num_tokens), 1)]
    while found[-1].end < num_tokens:
        start = found[-1].start + stride
        found.append(Window(start, min(start + context_length + 1, num_tokens), found[-1].end))
    return found


def _num_bytes(tokenizer: Tokenizer, token: int) -> int:
    """How many bytes of a text its first token writes."""
    written = tokenizer.token_bytes(token)
    return len(tokenizer.decode([token]).encode() if written is None else written)
