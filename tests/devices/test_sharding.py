"""The table of logical axes, its collisions, and what is left whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxml.devices.mesh import build_mesh
from jaxml.devices.sharding import (
    PARAMETER_TABLE,
    _partition,
    batch_sharding,
    check_table,
    constrain_batch,
    constrain_heads,
    leaf_sharding,
    split_heads,
    tree_shardings,
)
from jaxml.devices.spec import MeshSpec
from jaxml.errors import DeviceError


@pytest.fixture(scope="module")
def mesh():
    return build_mesh(MeshSpec(data=2, fsdp=4))


@pytest.mark.parametrize(
    ("axes", "shape", "partition"),
    [
        (("layers", "embed", "mlp"), (2, 16, 32), P(None, "fsdp")),
        (("layers", "mlp", "embed"), (2, 32, 16), P(None, None, "fsdp")),
        (("vocab", "embed"), (30, 16), P(None, "fsdp")),
        (("layers", "mlp"), (2, 32), P(None, "fsdp")),
        (("vocab",), (32,), P("fsdp")),
        (("layers", None), (4, 8), P()),
        (("embed", "mlp"), (6, 32), P(None, "fsdp")),  # embed does not divide, mlp does
        (("embed",), (6,), P()),
        ((), (), P()),
    ],
)
def test_fsdp_splits_embed_or_the_next_axis_that_it_divides(mesh, axes, shape, partition):
    assert leaf_sharding(axes, shape, mesh).spec == partition


def test_a_leaf_left_whole_is_reported_by_name_and_size(mesh):
    axes = {"a": {"bias": ("layers", "embed")}, "b": ("layers", None), "c": ("vocab", "embed")}
    leaves = {
        "a": {"bias": jax.ShapeDtypeStruct((2, 6), jnp.float32)},
        "b": jax.ShapeDtypeStruct((2, 3), jnp.float32),
        "c": jax.ShapeDtypeStruct((5, 8), jnp.float32),
    }
    shardings, notes = tree_shardings(axes, leaves, mesh)
    assert notes == ["a.bias: replicated, fsdp=4 divides none of embed=6"]
    assert shardings["a"]["bias"].spec == P()
    assert shardings["c"].spec == P(None, "fsdp")


@pytest.mark.parametrize(
    ("axes", "shape"), [(("embed", "embed"), (8, 8)), (("embed",), (8, 8)), (("widht", "mlp"), (8, 8))]
)
def test_axes_that_collide_or_do_not_fit_the_shape_are_refused(mesh, axes, shape):
    with pytest.raises(DeviceError, match="logical axes of a parameter"):
        leaf_sharding(axes, shape, mesh)


def test_two_mesh_axes_never_take_one_dimension():
    mesh = build_mesh(MeshSpec(data=2, fsdp=2, tensor=2))
    assert leaf_sharding(("layers", "embed", "mlp"), (2, 8, 8), mesh).spec == P(None, "fsdp", "tensor")
    assert leaf_sharding(("layers", "heads", "embed"), (2, 8, 8), mesh).spec == P(None, "tensor", "fsdp")
    assert leaf_sharding(("vocab",), (8,), mesh).spec == P("tensor")
    assert leaf_sharding(("embed",), (8,), mesh).spec == P("fsdp")


def test_a_new_axis_is_a_new_row_of_the_table():
    mesh = jax.make_mesh((2, 2), ("fsdp", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    table = {"expert": ("mlp", "vocab"), **PARAMETER_TABLE}
    check_table(table)
    assert _partition(("embed", "mlp"), (8, 8), mesh, table)[0] == P("fsdp", "expert")


def test_tokens_are_split_over_context_and_nothing_else_is():
    mesh = build_mesh(MeshSpec(data=2, fsdp=2, context=2))
    assert batch_sharding(mesh, 1).spec == P(("data", "fsdp"))
    assert batch_sharding(mesh, 2).spec == batch_sharding(mesh, 3).spec == P(("data", "fsdp"), "context")
    assert leaf_sharding(("layers", "embed", "mlp"), (2, 8, 8), mesh).spec == P(None, "fsdp")
    with jax.set_mesh(mesh):
        assert jax.jit(constrain_batch)(jnp.ones((4, 8, 3))).sharding.spec == P(("data", "fsdp"), "context")
        assert jax.jit(constrain_batch)(jnp.ones((4, 7))).sharding.spec == P(("data", "fsdp"))


def test_heads_are_split_where_tensor_divides_queries_and_keys():
    with jax.set_mesh(build_mesh(MeshSpec(data=1, fsdp=2, tensor=4))):
        assert [split_heads(8, 4), split_heads(8, 2), split_heads(6, 4)] == ["tensor", None, None]
        heads = jax.jit(lambda x: constrain_heads(x, split_heads(8, 4)))(jnp.ones((2, 3, 8, 5)))
        assert heads.sharding.is_equivalent_to(NamedSharding(heads.sharding.mesh, P("fsdp", None, "tensor")), 4)
    assert split_heads(8, 4) is None


def test_a_table_that_two_axes_fight_over_is_refused_with_all_faults():
    with pytest.raises(DeviceError) as raised:
        check_table({"fsdp": ("embed", "embed"), "tensor": ("embed", "nonsense")})
    got = " ".join(fault.got for fault in raised.value.faults)
    assert "first choice of 'fsdp'" in got
    assert "nonsense" in got


def test_batch_rows_are_split_over_both_axes(mesh):
    assert batch_sharding(mesh, 2).spec == P(("data", "fsdp"))
    assert batch_sharding(mesh, 0).spec == P()


def test_constrain_batch_needs_a_mesh_and_rows_that_divide(mesh):
    x, odd = jnp.ones((8, 3)), jnp.ones((3, 8))
    assert constrain_batch(x) is x
    placed = jax.jit(lambda x: constrain_batch(x, mesh))(x)
    assert placed.sharding.spec == P(("data", "fsdp"))
    with jax.set_mesh(mesh):
        assert jax.jit(constrain_batch)(x).sharding.spec == P(("data", "fsdp"))
        assert jax.jit(constrain_batch)(odd).shape == (3, 8)
