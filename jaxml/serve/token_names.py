"""Tokens and their log-probabilities as an answer tells them.

Reads `infer.text` and `inputs.tokenizers`; `serve.answers` and `serve.token_calls` read it.
"""

from __future__ import annotations

import math

from jaxml.infer.text import token_text
from jaxml.inputs.tokenizers import Tokenizer

# JSON has no infinity, and a masked token's log-probability is minus infinity. OpenAI documents this floor.
LEAST_LOGPROB = -9999.0


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


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold: from LEAST_LOGPROB to 0."""
    return LEAST_LOGPROB if math.isnan(logprob) else min(0.0, max(LEAST_LOGPROB, logprob))
