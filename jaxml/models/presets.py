"""Decoder specs that others published, and the quickstart's, as functions. No jax.

Reads `models.spec`; experiments start from these and change them with `dataclasses.replace`.
"""

from __future__ import annotations

from jaxml.models.spec import (
    AttentionSpec,
    BlockSpec,
    DecoderSpec,
    LearnedPositionSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
)


def shakespeare(vocab_size: int = 65) -> DecoderSpec:
    """The quickstart's model: nanoGPT's CPU size (4 layers, 4 heads, width 128) made of today's pieces, context 128."""
    attention = AttentionSpec(num_heads=4, num_kv_heads=4, head_width=32, rope=RopeSpec(), qk_norm=NormSpec())
    return DecoderSpec(
        vocab_size=vocab_size,
        context_length=128,
        width=128,
        num_layers=4,
        blocks=(BlockSpec(attention, MlpSpec(width=384)),),
    )


def nanogpt_cpu(vocab_size: int = 65) -> DecoderSpec:
    """nanoGPT's CPU recipe for Shakespeare by characters: 4 layers, 4 heads, width 128, context 64, no biases.

    Karpathy, nanoGPT README ("I only have a macbook"): `--n_layer=4 --n_head=4 --n_embd=128 --block_size=64
    --dropout=0.0`, and `bias = False` of train.py.
    """
    return _gpt2_family(vocab_size, context=64, width=128, layers=4, heads=4, has_bias=False, activation="gelu")


def nanogpt_gpu_char(vocab_size: int = 65) -> DecoderSpec:
    """nanoGPT's `config/train_shakespeare_char.py`: 6 layers, 6 heads, width 384, context 256, dropout 0.2.

    nanoGPT also drops attention weights; here dropout is on the embeddings and on both residual branches.
    """
    return _gpt2_family(
        vocab_size, context=256, width=384, layers=6, heads=6, has_bias=False, activation="gelu", dropout=0.2
    )


def gpt2_124m() -> DecoderSpec:
    """GPT-2 small (Radford et al. 2019): 124,439,808 parameters, context 1,024, biases, tanh GELU, tied head."""
    return _gpt2_family(50_257, context=1024, width=768, layers=12, heads=12, has_bias=True, activation="gelu_tanh")


def llama_15m() -> DecoderSpec:
    """The shape of stories15M (Karpathy, llama2.c): 15,191,712 parameters; context 4,096 instead of its 256."""
    return _llama_family(32_000, context=4096, width=288, layers=6, heads=6, kv_heads=6, mlp_width=768, tied=True)


def llama_1b() -> DecoderSpec:
    """TinyLlama 1.1B (Zhang 2024, arXiv:2401.02385): 1,100,048,384 parameters, grouped queries, context 2,048."""
    return _llama_family(32_000, context=2048, width=2048, layers=22, heads=32, kv_heads=4, mlp_width=5632, tied=False)


def _gpt2_family(
    vocab_size: int,
    *,
    context: int,
    width: int,
    layers: int,
    heads: int,
    has_bias: bool,
    activation: str,
    dropout: float = 0.0,
) -> DecoderSpec:
    norm = NormSpec(kind="layer", epsilon=1e-5, has_bias=has_bias)
    attention = AttentionSpec(heads, heads, width // heads, has_bias=has_bias, has_output_bias=has_bias)
    mlp = MlpSpec(4 * width, activation, has_bias)  # type: ignore[arg-type]
    return DecoderSpec(
        vocab_size=vocab_size,
        context_length=context,
        width=width,
        num_layers=layers,
        blocks=(BlockSpec(attention, mlp, norm),),
        position=LearnedPositionSpec(),
        final_norm=norm,
        dropout=dropout,
    )


def _llama_family(
    vocab_size: int, *, context: int, width: int, layers: int, heads: int, kv_heads: int, mlp_width: int, tied: bool
) -> DecoderSpec:
    norm = NormSpec(epsilon=1e-5)
    attention = AttentionSpec(heads, kv_heads, width // heads, rope=RopeSpec())
    return DecoderSpec(
        vocab_size=vocab_size,
        context_length=context,
        width=width,
        num_layers=layers,
        blocks=(BlockSpec(attention, MlpSpec(mlp_width), norm),),
        final_norm=norm,
        tied_head=tied,
    )
