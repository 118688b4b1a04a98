"""The bound of decoding: what a step has to read, over the speed at which it can be read. No jax.

Reads jaxml's `models.spec` and `models.cost`; `jaxml_decode` reports it beside what it measured.
"""

from __future__ import annotations

from jaxml.models.cost import num_parameters
from jaxml.models.spec import DecoderSpec

FLOAT32_BYTES = 4


def weight_bytes(spec: DecoderSpec, num_rows: int, item_bytes: int = FLOAT32_BYTES) -> int:
    """Bytes of parameters that one step of `num_rows` rows reads: all of them, but of tables that are only looked up
    (positions, and the embedding where the head is another matrix) one row for each row of the batch."""
    tables = []
    if spec.position is not None:
        tables.append(spec.context_length)
    if not spec.tied_head:
        tables.append(spec.vocab_size)
    unread = sum(spec.width * max(0, entries - num_rows) for entries in tables)
    return item_bytes * (num_parameters(spec) - unread)


def cache_bytes(spec: DecoderSpec, num_seen: int, item_bytes: int = FLOAT32_BYTES) -> int:
    """Bytes of keys and values that one row's step reads when its token sees `num_seen`, itself among them."""
    total = 0
    for layer in range(spec.num_layers):
        attention = spec.blocks[layer % len(spec.blocks)].attention
        seen = num_seen if attention.window is None else min(num_seen, attention.window)
        total += 2 * attention.num_kv_heads * attention.head_width * seen
    return item_bytes * total


def step_bytes(spec: DecoderSpec, num_rows: int, prompt_length: int, num_tokens: int) -> float:
    """Mean bytes of a decoding step, over the `num_tokens` - 1 steps that follow the prompt's."""
    seen = range(prompt_length + 1, prompt_length + num_tokens)
    cached = sum(cache_bytes(spec, num_seen) for num_seen in seen) / len(seen)
    return weight_bytes(spec, num_rows) + num_rows * cached


def bound_tokens_per_s(
    spec: DecoderSpec, num_rows: int, prompt_length: int, num_tokens: int, gbytes_per_s: float
) -> float:
    """Tokens a second over all rows, if a step took no longer than reading what it needs."""
    return num_rows * gbytes_per_s * 1e9 / step_bytes(spec, num_rows, prompt_length, num_tokens)
