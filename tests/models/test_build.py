"""Initial values, logical axes and faults of a bound model, and its layout on eight devices."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml import keys, trees
from jaxml.devices.mesh import build_mesh
from jaxml.devices.sharding import batch_sharding, tree_shardings
from jaxml.devices.spec import MeshSpec
from jaxml.errors import ConfigError
from jaxml.models.spec import AttentionSpec, BlockSpec, ClassifierSpec, MlpSpec
from tests.models import tiny

BIASED = tiny.SPECS["gpt2"]


@cache
def initial(seed: int = 0) -> dict[str, np.ndarray]:
    return trees.flatten(jax.device_get(jax.jit(tiny.bind(BIASED).init)(keys.root_key(seed))))


def test_initial_scales_are_those_of_gpt2():
    for path, leaf in initial().items():
        name = path.split(".")
        if name[-1] in ("kernel", "table"):
            expected = 0.02 / np.sqrt(2 * BIASED.num_layers) if name[-2] in ("output", "down") else 0.02
            assert leaf.std() == pytest.approx(expected, rel=0.25), path  # 128 draws or more
            assert abs(leaf.mean()) < 0.4 * expected, path
        else:
            np.testing.assert_array_equal(leaf, 1.0 if name[-1] == "scale" else 0.0)


def test_layers_leaves_and_seeds_draw_different_numbers():
    kernels = [layer for path, leaf in initial().items() if path.endswith("kernel") for layer in leaf]
    first = [kernel.ravel()[0] / kernel.std() for kernel in kernels]
    assert len({round(float(x), 5) for x in first}) == len(first)
    assert not np.array_equal(initial(1)["embed.table"], initial()["embed.table"])


def test_initial_values_depend_on_the_path_alone():
    blocks = (dataclasses.replace(BIASED.blocks[0], attention=AttentionSpec(2, 2, 8)),)
    others = {
        "scanned": tiny.bind(BIASED, layers="scanned", rematerialize="full"),
        "without biases": tiny.bind(dataclasses.replace(BIASED, blocks=blocks, head_bias=False)),
        "bfloat16": tiny.bind(BIASED, "bfloat16"),
    }
    for name, model in others.items():
        params = trees.flatten(jax.device_get(jax.jit(model.init)(keys.root_key(0))))
        for path, leaf in params.items():
            np.testing.assert_array_equal(leaf, initial()[path].astype(leaf.dtype), err_msg=f"{name}: {path}")


def test_leaves_are_stacked_per_repeating_group_and_named_by_the_contract():
    flat = trees.flatten(tiny.bind(tiny.SPECS["gemma"]).abstract_params)
    shapes = {path: leaf.shape for path, leaf in flat.items()}
    assert shapes["blocks.0.attention.query.kernel"] == (2, 16, 16)
    assert shapes["blocks.0.attention.key.kernel"] == (2, 16, 8)
    assert shapes["blocks.0.mlp.gate.kernel"] == (2, 16, 32)
    assert shapes["blocks.1.mlp.down.kernel"] == (2, 24, 16)
    assert shapes["blocks.1.attention.query_norm.scale"] == (2, 8)
    assert (shapes["embed.table"], shapes["head.kernel"]) == ((32, 16), (16, 32))
    assert "positions.table" not in shapes
    assert "head.kernel" not in trees.flatten(tiny.bind(BIASED).abstract_params)


@pytest.mark.parametrize("name", tiny.SPECS)
def test_every_leaf_has_a_logical_axis_for_every_dimension(name):
    model = tiny.bind(ClassifierSpec(tiny.SPECS[name], 3))
    leaves = trees.flatten(model.abstract_params)
    pairs, _ = jax.tree_util.tree_flatten_with_path(model.logical_axes, is_leaf=lambda x: isinstance(x, tuple))
    logical = {trees.path_name(path): value for path, value in pairs}
    assert {path: len(value) for path, value in logical.items()} == {path: leaf.ndim for path, leaf in leaves.items()}
    assert all(value[0] == "layers" for path, value in logical.items() if ".blocks." in path)


def test_parameters_are_born_sharded_and_equal_to_one_device_bit_for_bit():
    model, mesh = tiny.bind(BIASED), build_mesh(MeshSpec(data=1, fsdp=8))
    shardings, notes = tree_shardings(model.logical_axes, model.abstract_params, mesh)
    sharded = jax.jit(model.init, out_shardings=shardings)(keys.root_key(0))
    assert notes == []
    assert trees.compare(initial(), trees.flatten(sharded)) == []
    for path, leaf in trees.flatten(sharded).items():
        assert {shard.data.size * 8 for shard in leaf.addressable_shards} == {leaf.size}, path


def test_eight_devices_compute_what_one_does_and_gather_weights_not_activations():
    """Activations are exchanged for the embedding look-up alone, where the table is the larger of the two."""
    model, mesh = tiny.bind(tiny.SPECS["llama"], layers="scanned"), build_mesh(MeshSpec(data=2, fsdp=4))
    params = tiny.lively_params(model)
    batch = [np.tile(x, (2, 1)) for x in (tiny.TOKENS, tiny.POSITIONS, tiny.SEGMENTS)]

    def features(params, *batch):
        return model.bind(params)(*batch)[0]

    expected = jax.jit(features)(params, *batch)
    shardings, _ = tree_shardings(model.logical_axes, model.abstract_params, mesh)
    rows = batch_sharding(mesh, 2)
    with jax.set_mesh(mesh):
        compiled = jax.jit(features, in_shardings=(shardings, rows, rows, rows)).lower(params, *batch).compile()
    got = compiled(jax.device_put(params, shardings), *(jax.device_put(x, rows) for x in batch))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert got.sharding.is_equivalent_to(batch_sharding(mesh, 3), 3)
    lines = compiled.as_text().splitlines()
    assert any("all-gather(" in line for line in lines)
    assert all("_take" in line for line in lines if "all-to-all(" in line)


def test_bind_casts_to_the_compute_dtype():
    model = tiny.bind(BIASED, "float32", "bfloat16")
    assert model.abstract_params["embed"]["table"].dtype == jnp.float32
    bound = jax.eval_shape(lambda p: model.bind(p).embed.table[...], model.abstract_params)
    assert bound.dtype == jnp.bfloat16


def test_every_fault_of_a_spec_is_reported_at_once():
    block = BlockSpec(AttentionSpec(3, 2, 5, rope=tiny.PLAIN.attention.rope, window=0), MlpSpec(0))
    spec = tiny.decoder(block, tiny.PLAIN, num_layers=3, dropout=1.0, logit_softcap=-1.0, width=0)
    with pytest.raises(ConfigError) as raised:
        tiny.bind(ClassifierSpec(spec, 1))
    assert [fault.failed.removeprefix("model.") for fault in raised.value.faults] == [
        "num_classes",
        "decoder.width",
        "decoder.num_layers",
        "decoder.dropout",
        "decoder.logit_softcap",
        "decoder.blocks.0.mlp.width",
        "decoder.blocks.0.attention.num_kv_heads",
        "decoder.blocks.0.attention.head_width",
        "decoder.blocks.0.attention.window",
    ]


def test_an_attention_form_that_cannot_run_is_refused_before_any_trace():
    with pytest.raises(ConfigError, match="cuDNN needs an NVIDIA GPU, and the backend is cpu"):
        tiny.bind(BIASED, attention="cudnn")
