"""Llama's config.json and tensor names: against what transformers writes, and both ways."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml import trees
from jaxml.errors import CheckpointError
from jaxml.models.build import bind_model
from jaxml.models.families.llama import spec_from_config, tensors
from jaxml.models.families.tensors import to_canonical, to_published
from jaxml.models.spec import AttentionSpec, BlockSpec, DecoderSpec, ExecutionSpec, MlpSpec, NormSpec, RopeSpec
from jaxml.numerics.spec import PrecisionSpec
from tests.models.families.tiny import CONFIG, VARIANTS, random_tensors, shapes


def without(*names: str) -> dict:
    return {name: value for name, value in CONFIG.items() if name not in names}


def test_the_spec_of_a_config_in_full():
    norm = NormSpec("rms", 1e-5)
    attention = AttentionSpec(4, 2, 6, rope=RopeSpec(500.0))
    assert spec_from_config(CONFIG) == DecoderSpec(
        vocab_size=20,
        context_length=8,
        width=16,
        num_layers=2,
        blocks=(BlockSpec(attention, MlpSpec(24), norm),),
        final_norm=norm,
        tied_head=True,
    )


def test_absent_keys_have_the_defaults_of_transformers():
    spec = spec_from_config(
        without("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "architectures")
    )
    attention = spec.blocks[0].attention
    assert (attention.num_kv_heads, attention.head_width, attention.rope) == (4, 4, RopeSpec(10_000.0))
    assert (spec.final_norm.epsilon, spec.tied_head) == (1e-6, False)
    assert not attention.has_bias and not attention.has_output_bias and not spec.blocks[0].mlp.has_bias


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 100.0},
        {"rope_theta": 100.0, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}},
        {"rope_theta": 100, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}},
        {"rope_theta": 100.0, "rope_scaling": {"type": "default"}},
    ],
)
def test_both_spellings_of_the_rotary_base_are_read(rope):
    assert spec_from_config(without("rope_theta") | rope).blocks[0].attention.rope == RopeSpec(100.0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling: rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: factor"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters: rope_type"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": "default"}, "rope_parameters"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"model_type": "mistral"}, "model_type"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
        ({"attention_bias": "no"}, "attention_bias"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ],
)
def test_a_key_that_changes_the_maths_and_is_not_understood_is_refused_by_name(change, name):
    with pytest.raises(CheckpointError) as raised:
        spec_from_config(CONFIG | change)
    assert any(fault.failed == f"config.json: {name}" or name in fault.failed for fault in raised.value.faults)


def test_all_that_is_wrong_is_told_in_one_error():
    with pytest.raises(CheckpointError) as raised:
        spec_from_config(without("hidden_size") | {"hidden_act": "relu", "sliding_window": 4, "novelty": 1})
    assert len(raised.value.faults) == 4


@pytest.mark.parametrize("name", VARIANTS)
def test_names_and_shapes_are_those_that_transformers_writes(name):
    config = CONFIG | VARIANTS[name]
    assert {tensor.name: tensor.shape for tensor in tensors(spec_from_config(config))} == shapes(config)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_map_fills_every_leaf_of_the_model_and_no_other(name):
    spec = spec_from_config(CONFIG | VARIANTS[name])
    bound = bind_model(spec, PrecisionSpec(), ExecutionSpec(), backend="cpu")
    expected = {path: leaf.shape for path, leaf in trees.flatten(bound.abstract_params).items()}
    leaves = to_canonical(tensors(spec), random_tensors(CONFIG | VARIANTS[name]).__getitem__, np.float32)
    assert {path: leaf.shape for path, leaf in leaves} == expected


@given(
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    num_layers=st.integers(1, 4),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_there_and_back_is_the_identity_in_both_directions(heads, num_layers, flags, seed):
    config = CONFIG | dict(zip(("attention_bias", "mlp_bias", "tie_word_embeddings"), flags, strict=True))
    config |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "num_hidden_layers": num_layers}
    names, published = tensors(spec_from_config(config)), random_tensors(config, seed=seed)
    leaves = dict(to_canonical(names, published.__getitem__, np.float32))
    back = to_published(names, leaves)
    assert trees.compare(published, back) == []
    assert trees.compare(leaves, dict(to_canonical(names, back.__getitem__, np.float32))) == []
