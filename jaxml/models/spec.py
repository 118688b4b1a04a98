"""What a model is, as data: a decoder made of typed pieces, and a classifier on top of one. No jax.

Reads `config.spec`; `models.decoder` and `models.classifier` build the Flax modules, `models.cost` counts parameters
and FLOPs. A field that only one family of models uses lives in the spec of that piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxml.config.spec import Spec

# What the values inside a decoder are called (`models.named`), in program order; each layer makes LAYER_VALUES once.
LAYER_VALUES = ("query", "key", "value", "attention_mixed", "attention_output", "mlp_hidden", "mlp_output")
VALUE_NAMES = ("embedded", *LAYER_VALUES, "final_norm", "logits")

# How the matrices of a decoder are stored and multiplied (`models.quantized`): int8 weights and activations rounded to int8
# as they come ("int8"), or int8 weights alone ("int8-weights").
Quantization = Literal["int8", "int8-weights"]


@dataclass(frozen=True)
class NormSpec(Spec):
    """Normalisation over the width. `layer` subtracts the mean (Ba et al. 2016); `rms` does not (Zhang 2019)."""

    kind: Literal["layer", "rms"] = "rms"
    epsilon: float = 1e-6
    has_bias: bool = False


@dataclass(frozen=True)
class RopeSpec(Spec):
    """Rotary positions (Su et al. 2021), halves rotated together as in GPT-NeoX and Llama."""

    base: float = 10_000.0


@dataclass(frozen=True)
class LearnedPositionSpec(Spec):
    """A learned table of `context_length` position embeddings, added to the token embeddings."""


@dataclass(frozen=True)
class AttentionSpec(Spec):
    """Multi-head (num_kv_heads = num_heads), grouped-query or multi-query (num_kv_heads = 1) attention.

    `window`: a query sees itself and the `window - 1` tokens before it (and as many after it in a bidirectional model);
    None sees everything.
    `logit_softcap`: scores become cap * tanh(scores / cap).
    """

    num_heads: int
    num_kv_heads: int
    head_width: int
    rope: RopeSpec | None = None
    has_bias: bool = False
    has_output_bias: bool = False
    qk_norm: NormSpec | None = None
    window: int | None = None
    logit_softcap: float | None = None


@dataclass(frozen=True)
class MlpSpec(Spec):
    """The feed-forward piece; `swiglu` and `geglu` are gated and have a third matrix. `gelu` is the exact form."""

    width: int
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu", "squared_relu"] = "swiglu"
    has_bias: bool = False

    @property
    def is_gated(self) -> bool:
        return self.activation in ("swiglu", "geglu")


@dataclass(frozen=True)
class BlockSpec(Spec):
    """A pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x))."""

    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec = NormSpec()


@dataclass(frozen=True)
class DecoderSpec(Spec):
    """A stack of blocks. `blocks` is the repeating pattern: layer i is `blocks[i % len(blocks)]`; its length divides
    `num_layers`. `context_length`: the longest row, and the rows of a learned position table. `dropout`: on the summed
    embeddings and on both branches of each block. `quantization`: what `jaxml quantize` makes of a model; not trained."""

    vocab_size: int
    context_length: int
    width: int
    num_layers: int
    blocks: tuple[BlockSpec, ...]
    position: LearnedPositionSpec | None = None
    final_norm: NormSpec = NormSpec()
    is_causal: bool = True
    tied_head: bool = True
    head_bias: bool = False
    logit_softcap: float | None = None
    dropout: float = 0.0
    quantization: Quantization | None = None


@dataclass(frozen=True)
class ClassifierSpec(Spec):
    """Class logits from the pooled features of a decoder; `mean` over the valid tokens, or the `last` valid one."""

    decoder: DecoderSpec
    num_classes: int
    pooling: Literal["mean", "last"] = "mean"


ModelSpec = DecoderSpec | ClassifierSpec


@dataclass(frozen=True)
class ExecutionSpec(Spec):
    """How a model is computed; nothing here changes its parameters or its mathematics.

    `rematerialize`: what each block computes again in the backward pass instead of keeping it: nothing, everything
    ("full"), everything but the projections' products ("dots"), or everything but the values in `saved_names`
    ("names", some of LAYER_VALUES). `context`: how the keys of other devices reach a query when the mesh splits the tokens:
    round a ring, all gathered, or ("auto") gathered on two devices and round the ring on more.
    `logits_chunk_bytes`: the loss takes the vocabulary projection in chunks of rows once the float32 logits of one
    microbatch would exceed this.
    """

    layers: Literal["unrolled", "scanned"] = "unrolled"
    rematerialize: Literal["none", "full", "dots", "names"] = "none"
    saved_names: tuple[str, ...] = ()
    attention: Literal["auto", "xla", "cudnn", "pallas"] = "auto"
    context: Literal["auto", "ring", "gather"] = "auto"
    logits_chunk_bytes: int = 64 * 2**20
