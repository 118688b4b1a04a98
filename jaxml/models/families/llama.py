"""Llama (Touvron et al. 2023, arXiv:2302.13971) as Hugging Face publishes it: spec and tensor names. No jax.

Reads `models.spec` and its neighbours `config`, `tensors`, `family`; `recipes.importing` takes `LLAMA`. Rotary halves are
paired as in `models.rope`, so that projections need no permutation. Rope scaling is not implemented yet and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jaxml.models.families.config import PublishedConfig
from jaxml.models.families.family import Family
from jaxml.models.families.tensors import PublishedTensor
from jaxml.models.spec import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec, NormSpec, RopeSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DEFAULT_ROPE_BASE = 10_000.0


def spec_from_config(config: dict[str, Any]) -> DecoderSpec:
    """The decoder that a config.json describes; absent keys have the defaults of transformers' LlamaConfig.

    Raises CheckpointError naming every key that is missing, faulty, or asks for what is not implemented.
    """
    keys = PublishedConfig(config)
    keys.only("model_type", "llama")
    keys.only("architectures", ["LlamaForCausalLM"])
    keys.only("hidden_act", "silu", "swish")
    keys.only("partial_rotary_factor", 1.0)
    for off in ("use_sliding_window", "rope_interleaved", "is_decoder", "is_encoder_decoder", "add_cross_attention"):
        keys.only(off, False)
    for absent in ("sliding_window", "quantization_config", "layer_types", "pruned_heads"):
        keys.only(absent)
    width, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    has_bias = keys.flag("attention_bias", False)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=keys.size("num_key_value_heads", num_heads),
        head_width=keys.size("head_dim", max(1, width // num_heads)),
        rope=RopeSpec(_rope_base(keys)),
        has_bias=has_bias,
        has_output_bias=has_bias,
    )
    mlp = MlpSpec(keys.size("intermediate_size"), "swiglu", has_bias=keys.flag("mlp_bias", False))
    norm = NormSpec("rms", keys.number("rms_norm_eps", 1e-6))
    spec = DecoderSpec(
        vocab_size=keys.size("vocab_size"),
        context_length=keys.size("max_position_embeddings"),
        width=width,
        num_layers=keys.size("num_hidden_layers"),
        blocks=(BlockSpec(attention, mlp, norm),),
        final_norm=norm,
        tied_head=keys.flag("tie_word_embeddings", False),
    )
    keys.finish()
    return spec


def _rope_base(keys: PublishedConfig) -> float:
    """The rotary base: `rope_theta`, or inside `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    bases = {}
    if keys.values.get("rope_theta") is not None:
        bases["rope_theta"] = keys.number("rope_theta")
    for name in ("rope_parameters", "rope_scaling"):
        inner = keys.inner(name)
        if inner is None:
            continue
        for kind in ("rope_type", "type"):
            inner.only(kind, "default", todo="take a model without rope scaling: it is not implemented yet")
        inner.only("partial_rotary_factor", 1.0)
        if "rope_theta" in inner.values:
            bases[name] = inner.number("rope_theta")
        inner.refuse_unread()
    if len(set(bases.values())) > 1:
        keys.refuse("rope_theta", "one rotary base", bases, "remove the wrong one from config.json")
    return next(iter(bases.values()), DEFAULT_ROPE_BASE)


def tensors(spec: DecoderSpec) -> tuple[PublishedTensor, ...]:
    """Every tensor that a Llama of this spec has; a tied head has none of its own."""
    found = [PublishedTensor(EMBEDDING, (spec.vocab_size, spec.width), "embed.table")]
    of_a_layer = list(_layer_tensors(spec))
    for layer in range(spec.num_layers):
        for name, shape, leaf, is_kernel in of_a_layer:
            place = f"blocks.0.{leaf}"
            found.append(PublishedTensor(f"model.layers.{layer}.{name}", shape, place, layer, is_transposed=is_kernel))
    found.append(PublishedTensor("model.norm.weight", (spec.width,), "final_norm.scale"))
    if not spec.tied_head:
        found.append(PublishedTensor(HEAD, (spec.vocab_size, spec.width), "head.kernel", is_transposed=True))
    return tuple(found)


def _layer_tensors(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...], str, bool]]:
    """(published name, shape, canonical leaf, whether it is the kernel of a linear layer) for one layer."""
    attention, mlp = spec.blocks[0].attention, spec.blocks[0].mlp
    q_width, kv_width = (n * attention.head_width for n in (attention.num_heads, attention.num_kv_heads))
    linears = {
        "self_attn.q_proj": ("attention.query", spec.width, q_width, attention.has_bias),
        "self_attn.k_proj": ("attention.key", spec.width, kv_width, attention.has_bias),
        "self_attn.v_proj": ("attention.value", spec.width, kv_width, attention.has_bias),
        "self_attn.o_proj": ("attention.output", q_width, spec.width, attention.has_output_bias),
        "mlp.gate_proj": ("mlp.gate", spec.width, mlp.width, mlp.has_bias),
        "mlp.up_proj": ("mlp.up", spec.width, mlp.width, mlp.has_bias),
        "mlp.down_proj": ("mlp.down", mlp.width, spec.width, mlp.has_bias),
    }
    yield "input_layernorm.weight", (spec.width,), "attention_norm.scale", False
    yield "post_attention_layernorm.weight", (spec.width,), "mlp_norm.scale", False
    for name, (leaf, num_in, num_out, has_bias) in linears.items():
        yield f"{name}.weight", (num_out, num_in), f"{leaf}.kernel", True
        if has_bias:
            yield f"{name}.bias", (num_out,), f"{leaf}.bias", False


LLAMA = Family(
    name="llama",
    spec_from_config=spec_from_config,
    tensors=tensors,
    # Old files hold the rotary frequencies, which follow from the base.
    unused=re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
    tied={HEAD: EMBEDDING},
)
