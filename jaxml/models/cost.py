"""Parameters and FLOPs of a model, counted from its spec alone. No jax.

Reads `models.spec` and `models.check`; `recipes` and `observe` report these numbers.
"""

from __future__ import annotations

from jaxml.models.check import decoder_of
from jaxml.models.spec import AttentionSpec, BlockSpec, ClassifierSpec, DecoderSpec, MlpSpec, NormSpec


def num_parameters(spec: DecoderSpec | ClassifierSpec) -> int:
    """Elements over all leaves of the model's parameter tree."""
    decoder = decoder_of(spec)
    total = decoder.vocab_size * decoder.width + _norm(decoder.final_norm, decoder.width)
    if decoder.position is not None:
        total += decoder.context_length * decoder.width
    for layer in range(decoder.num_layers):
        block = decoder.blocks[layer % len(decoder.blocks)]
        total += _block_matrices(block, decoder.width) + _block_vectors(block, decoder.width)
    if isinstance(spec, ClassifierSpec):
        return total + (decoder.width + 1) * spec.num_classes
    if not decoder.tied_head:
        total += decoder.width * decoder.vocab_size
    return total + (decoder.vocab_size if decoder.head_bias else 0)


def flops_per_token(spec: DecoderSpec | ClassifierSpec, sequence_length: int) -> float:
    """Model FLOPs of one forward and backward pass, per token of a full row: 6 N + 12 N_heads H S summed over layers.

    N counts the elements of the matrices that multiply activations: the head's once (tied or not), embedding look-ups,
    norms and biases not. S is the number of keys that a query attends to, `sequence_length` or the window if that is
    smaller, without the half that a causal mask hides. As PaLM, appendix B (Chowdhery et al. 2022, arXiv:2204.02311):
    rematerialisation and the optimizer are not counted.
    """
    decoder = decoder_of(spec)
    matrices, attention = 0.0, 0.0
    for layer in range(decoder.num_layers):
        block = decoder.blocks[layer % len(decoder.blocks)]
        matrices += _block_matrices(block, decoder.width)
        seen = _keys_seen(block.attention, decoder, sequence_length)
        attention += block.attention.num_heads * block.attention.head_width * seen
    if isinstance(spec, ClassifierSpec):
        matrices += decoder.width * spec.num_classes / sequence_length
    else:
        matrices += decoder.width * decoder.vocab_size
    return 6.0 * matrices + 12.0 * attention


def _keys_seen(spec: AttentionSpec, decoder: DecoderSpec, sequence_length: int) -> int:
    if spec.window is None:
        return sequence_length
    return min(sequence_length, spec.window if decoder.is_causal else 2 * spec.window - 1)


def _block_matrices(spec: BlockSpec, width: int) -> int:
    attention, mlp = spec.attention, spec.mlp
    heads = 2 * attention.num_heads + 2 * attention.num_kv_heads  # query and output, key and value
    return width * attention.head_width * heads + width * mlp.width * (3 if mlp.is_gated else 2)


def _block_vectors(spec: BlockSpec, width: int) -> int:
    attention, total = spec.attention, 2 * _norm(spec.norm, width)
    if attention.qk_norm is not None:
        total += 2 * _norm(attention.qk_norm, attention.head_width)
    if attention.has_bias:
        total += attention.head_width * (attention.num_heads + 2 * attention.num_kv_heads)
    if attention.has_output_bias:
        total += width
    return total + _mlp_biases(spec.mlp, width)


def _mlp_biases(spec: MlpSpec, width: int) -> int:
    return (spec.width * (2 if spec.is_gated else 1) + width) if spec.has_bias else 0


def _norm(spec: NormSpec, width: int) -> int:
    return width * (2 if spec.has_bias else 1)
