"""The tiny models of these tests (width 16, 2 heads, vocab 32, T = 8), their batch, and one way to run them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxml import keys
from jaxml.models.build import BoundModel, bind_model
from jaxml.models.spec import (
    AttentionSpec,
    BlockSpec,
    ClassifierSpec,
    DecoderSpec,
    ExecutionSpec,
    LearnedPositionSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
)
from jaxml.numerics.spec import PrecisionSpec

LAYER, RMS = NormSpec("layer", 1e-5, has_bias=True), NormSpec()
PLAIN = BlockSpec(AttentionSpec(2, 2, 8, rope=RopeSpec()), MlpSpec(32))


def decoder(*blocks: BlockSpec, num_layers: int = 2, **changes: Any) -> DecoderSpec:
    """The shared decoder with another pattern of blocks, or other fields."""
    spec = DecoderSpec(vocab_size=32, context_length=8, width=16, num_layers=num_layers, blocks=blocks or (PLAIN,))
    return dataclasses.replace(spec, **changes)


# Every option at least once, most of them in two companies; the first is the one that most laws use.
SPECS = {
    "llama": decoder(dataclasses.replace(PLAIN, attention=AttentionSpec(2, 1, 8, rope=RopeSpec()))),
    "gpt2": decoder(
        BlockSpec(AttentionSpec(2, 2, 8, has_bias=True, has_output_bias=True), MlpSpec(32, "gelu", True), LAYER),
        position=LearnedPositionSpec(),
        final_norm=LAYER,
        head_bias=True,
    ),
    "gemma": decoder(
        BlockSpec(AttentionSpec(2, 1, 8, rope=RopeSpec(100.0), window=3, logit_softcap=0.5), MlpSpec(32, "geglu")),
        BlockSpec(AttentionSpec(2, 2, 8, rope=RopeSpec(), qk_norm=RMS), MlpSpec(24, "gelu_tanh", True), LAYER),
        num_layers=4,
        logit_softcap=0.7,
        tied_head=False,
    ),
    "encoder": decoder(
        BlockSpec(AttentionSpec(4, 2, 4, qk_norm=LAYER, window=2, has_bias=True), MlpSpec(32, "squared_relu")),
        position=LearnedPositionSpec(),
        is_causal=False,
        tied_head=False,
        head_bias=True,
    ),
}

# Two documents and padding; one document and padding; a full row; nothing but padding.
SEGMENTS = np.array([[1] * 3 + [2] * 4 + [0], [1] * 5 + [0] * 3, [1] * 8, [0] * 8], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 0, 0], range(8), [0] * 8], np.int32)
TOKENS = np.random.default_rng(0).integers(0, 32, SEGMENTS.shape).astype(np.int32)


def bind(
    spec: DecoderSpec | ClassifierSpec, dtype: str = "float32", compute: str | None = None, **execution: Any
) -> BoundModel:
    return bind_model(spec, PrecisionSpec(dtype, compute or dtype), ExecutionSpec(**execution))  # type: ignore[arg-type]


def lively_params(bound: BoundModel, seed: int = 0) -> dict[str, Any]:
    """Parameters far from their initial values, biases and scales included, so that no term hides (no compile)."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0.0, 0.4, leaf.shape), leaf.dtype), bound.abstract_params)


def dropout_keys(num_rows: int, step: int = 0) -> jax.Array:
    return keys.row_keys(keys.step_key(0, step, "dropout"), jnp.arange(num_rows))
