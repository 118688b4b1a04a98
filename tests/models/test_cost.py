"""Counted parameters equal the tree's for every preset, and counted FLOPs are near XLA's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxml import trees
from jaxml.models import presets
from jaxml.models.cost import flops_per_token, num_parameters
from jaxml.models.spec import AttentionSpec, BlockSpec, ClassifierSpec, MlpSpec
from tests.models import tiny

# Published counts; None where nobody published one.
PRESETS = {
    presets.shakespeare: None,
    presets.nanogpt_cpu: None,
    presets.nanogpt_gpu_char: None,
    presets.gpt2_124m: 124_439_808,
    presets.llama_15m: 15_191_712,
    presets.llama_1b: 1_100_048_384,
}
MODELS = {**{preset.__name__: preset() for preset in PRESETS}, **tiny.SPECS}


@pytest.mark.parametrize("name", MODELS)
def test_counted_parameters_equal_the_tree(name):
    for spec in (MODELS[name], ClassifierSpec(MODELS[name], 3)):
        assert num_parameters(spec) == trees.num_parameters(tiny.bind(spec).abstract_params)


@pytest.mark.parametrize("preset", [preset for preset, published in PRESETS.items() if published])
def test_presets_have_the_published_number_of_parameters(preset):
    assert num_parameters(preset()) == PRESETS[preset]


@pytest.mark.parametrize("activation", ["squared_relu", "swiglu"])
def test_flops_are_within_a_twentieth_of_what_xla_counts(activation):
    """XLA also counts norms, activations, the softmax and masks: at width 64 that is a few hundredths more."""
    block = BlockSpec(AttentionSpec(4, 2, 16), MlpSpec(256, activation))
    spec = tiny.decoder(block, width=64, vocab_size=512, context_length=32)
    model = tiny.bind(spec)
    batch = [jax.ShapeDtypeStruct((2, 32), jnp.int32)] * 3

    def value(params, *batch):
        decoder = model.bind(params)
        return decoder.logits(decoder(*batch)[0]).sum()

    counted = jax.jit(jax.value_and_grad(value)).lower(model.abstract_params, *batch).cost_analysis()["flops"]
    assert 1.0 <= counted / (2 * 32 * flops_per_token(spec, 32)) < 1.05


def test_a_window_lowers_the_attention_term_and_the_head_counts_once():
    block = tiny.PLAIN
    windowed = BlockSpec(AttentionSpec(2, 2, 8, rope=block.attention.rope, window=3), block.mlp)
    whole, near = tiny.decoder(block), tiny.decoder(windowed)
    assert flops_per_token(whole, 8) - flops_per_token(near, 8) == 12 * 2 * 16 * (8 - 3)
    assert flops_per_token(near, 2) == flops_per_token(whole, 2)
    assert flops_per_token(tiny.decoder(tied_head=False), 8) == flops_per_token(tiny.decoder(), 8)
    two_sided = tiny.decoder(windowed, is_causal=False)
    assert flops_per_token(two_sided, 8) - flops_per_token(near, 8) == 12 * 2 * 16 * 2
