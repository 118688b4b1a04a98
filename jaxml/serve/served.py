"""What an API process knows of a model that a worker serves, and the most that a request may ask of it.

Reads `infer.request`, `inputs.tokenizers`; the parsers of requests check against it, `serve.endpoints` makes it of the
worker's cards. No jax.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxml.infer.request import MAX_STOP_STRINGS, MAX_STOP_TOKENS, Deadlines
from jaxml.inputs.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for. answers: choices of all prompts together. stop_characters: of each string.
    inputs: texts to embed. tools, tool_calls: functions that are described, and calls in one message. nesting: how deep a
    tool's description or the arguments of a call may go. timeout_s: the longest deadline.
    """

    body_bytes: int = 2**20
    choices: int = 16
    prompts: int = 32
    answers: int = 64
    inputs: int = 256
    messages: int = 1024
    content_parts: int = 64
    tools: int = 128
    tool_calls: int = 128
    nesting: int = 32
    stop_strings: int = MAX_STOP_STRINGS
    stop_characters: int = 256
    stop_tokens: int = MAX_STOP_TOKENS
    timeout_s: float = 86_400.0


@dataclass(frozen=True)
class Served:
    """One model. created: when, in seconds since 1970. context_length: of prompt and answer together, in tokens.

    has_embeddings: whether it makes them, of embedding_size numbers (0: not known). deadlines: of the service, which a
    request may only shorten.
    """

    name: str
    tokenizer: Tokenizer
    context_length: int
    created: int = 0
    has_embeddings: bool = False
    embedding_size: int = 0
    limits: Limits = Limits()
    deadlines: Deadlines = Deadlines()

    @classmethod
    def from_card(cls, card: dict[str, Any], limits: Limits = Limits(), deadlines: Deadlines = Deadlines()) -> Served:
        """The worker's card, with the files of its tokenizer: text is encoded here, not in the worker."""
        with tempfile.TemporaryDirectory(prefix="jaxml-tokenizer-") as folder:
            for name, content in card["tokenizer"].items():
                (Path(folder) / name).write_bytes(content)
            tokenizer = load_tokenizer(folder)
        return cls(
            card["name"],
            tokenizer,
            card["context_length"],
            card["created"],
            bool(card.get("has_embeddings", False)),
            int(card.get("embedding_size", 0)),
            limits,
            deadlines,
        )
