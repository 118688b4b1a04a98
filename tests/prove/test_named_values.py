"""Named values come in program order, from wherever they are made, with the line that made them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.models.build import bind_model
from jaxml.models.named import named
from jaxml.models.spec import ExecutionSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.prove.named_values import named_values
from jaxml.prove.parting import in_layers
from tests.tiny import tiny_model

ONE, MANY = MeshSpec(data=1), MeshSpec(data=2, fsdp=2, tensor=2)
X = jnp.arange(4.0)


def names_of(function, *arguments, mesh: MeshSpec = ONE) -> list[tuple[str, list[float]]]:
    found = named_values(function, arguments, build_mesh(mesh))
    return [(value.name, value.value.tolist()) for value in found]


def test_values_come_in_program_order_with_the_line_that_named_them() -> None:
    def function(x):
        first = named(x + 1, "query")
        return named(first * 2, "key")

    found = named_values(function, (X,), build_mesh(ONE))
    assert [value.name for value in found] == ["query", "key"]
    assert [value.value.tolist() for value in found] == [[1, 2, 3, 4], [2, 4, 6, 8]]
    lines = [int(value.made_by.rpartition(" ")[2]) for value in found]
    assert "test_named_values.py" in found[0].made_by
    assert lines[1] == lines[0] + 1


def test_values_inside_calls_blocks_that_are_computed_again_and_derivatives_are_found() -> None:
    @jax.custom_vjp
    def twice(x):
        return named(2 * x, "query")

    twice.defvjp(lambda x: (twice(x), None), lambda _, grad: (2 * grad,))

    def block(x):
        return jnp.sum(jax.checkpoint(lambda y: jnp.sin(named(y, "key")))(jax.jit(twice)(x)))

    assert [name for name, _ in names_of(block, X)] == ["query", "key"]
    # In the backward pass the block is computed again.
    assert [name for name, _ in names_of(jax.value_and_grad(block), X)] == ["query", "key", "key"]


def test_values_of_a_scan_are_stacked_by_iteration_and_the_loop_around_them_comes_first() -> None:
    def outer(total, x):
        def inner(part, y):
            part = named(part + y, "query")
            return part, part

        return jax.lax.scan(inner, total, jnp.stack([x, 10 * x]))[0], None

    (value,) = named_values(lambda xs: jax.lax.scan(outer, 0.0, xs)[0], (jnp.array([1.0, 2.0]),), build_mesh(ONE))
    assert value.value.tolist() == [[1.0, 11.0], [13.0, 33.0]]
    assert len(value.scans) == 2


def test_a_value_that_the_result_does_not_need_is_no_part_of_the_program() -> None:
    def function(x):
        named(x + 1, "key")
        return named(x + 2, "query")

    assert [name for name, _ in names_of(function, X)] == ["query"]


def test_a_name_given_without_jaxml_counts_too() -> None:
    (value,) = named_values(lambda x: checkpoint_name(x * 3, "mine"), (X,), build_mesh(ONE))
    assert (value.name, value.value.tolist()) == ("mine", [0, 3, 6, 9])


@pytest.mark.parametrize("rematerialize", ["none", "full"])
@pytest.mark.parametrize("mesh", [ONE, MANY], ids=["one device", "sharded"])
def test_scanned_and_unrolled_layers_have_the_same_values_in_the_same_order(mesh: MeshSpec, rematerialize: str) -> None:
    tokens = np.arange(64, dtype=np.int32).reshape(4, 16)
    runs = []
    for layers in ("unrolled", "scanned"):
        execution = ExecutionSpec(layers=layers, rematerialize=rematerialize)
        bound = bind_model(tiny_model(), PrecisionSpec("float64", "float64"), execution)

        def forward(params, tokens, bound=bound):
            model = bound.bind(params)
            places = jnp.broadcast_to(jnp.arange(16), tokens.shape)
            return model.logits(model(tokens, places, jnp.ones_like(tokens))[0])

        params = bound.init(jax.random.key(0))
        runs.append(in_layers(named_values(forward, (params, tokens), build_mesh(mesh)), bound.spec))
    assert [step.name for step in runs[0]] == [step.name for step in runs[1]]
    assert runs[0][1].name == "query, layer 0"
    assert runs[0][-3].name == "mlp_output, layer 1"
    for one, other in zip(*runs, strict=True):
        np.testing.assert_allclose(one.value, other.value, rtol=1e-12, atol=1e-14)
