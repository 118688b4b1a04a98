"""The product that every linear map makes: its value and gradient, and where it may not merge rows and tokens."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.models.parameters import dense

RNG = np.random.default_rng(0)
X, KERNEL, GRAD = (RNG.standard_normal(shape) for shape in ((4, 6, 8), (8, 3), (4, 6, 3)))


@pytest.mark.parametrize("context", [1, 2])
def test_value_and_gradients_are_those_of_the_matrix_product(context):
    with jax.enable_x64(True), jax.set_mesh(build_mesh(MeshSpec(1, 1, context))):
        value, back = jax.vjp(jax.jit(dense), X, KERNEL)
        grad_x, grad_kernel = back(GRAD)
    np.testing.assert_allclose(value, X @ KERNEL, rtol=1e-12)
    np.testing.assert_allclose(grad_x, GRAD @ KERNEL.T, rtol=1e-12)
    np.testing.assert_allclose(grad_kernel, np.einsum("bti,bto->io", X, GRAD), rtol=1e-12)


@pytest.mark.parametrize(("context", "merges"), [(1, True), (2, False)])
def test_rows_and_tokens_are_merged_only_where_the_mesh_does_not_split_tokens(context, merges):
    """Merged, split rows and split tokens would have to be gathered."""
    with jax.set_mesh(build_mesh(MeshSpec(1, 1, context))):
        jaxpr = str(jax.make_jaxpr(lambda x, kernel, grad: jax.vjp(dense, x, kernel)[1](grad))(X, KERNEL, GRAD))
    assert ("reshape" in jaxpr) == merges
