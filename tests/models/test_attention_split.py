"""Attention over tokens that the mesh splits equals attention on one device, in value and gradient, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.models.attention_blocks import Shape, attend_blocks
from jaxml.models.attention_split import attend_split

ROWS, TOKENS, WIDTH = 4, 16, 4


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def drawn(num_heads: int, num_kv_heads: int) -> tuple[jax.Array, ...]:
    """(q, k, v, segment ids, weights of the output): packed rows of one to four documents, the last with padding."""
    rng = np.random.default_rng(num_heads)
    q, k, v = (jnp.asarray(rng.normal(size=(ROWS, TOKENS, n, WIDTH))) for n in (num_heads, num_kv_heads, num_kv_heads))
    segments = np.sort(rng.integers(1, 4, (ROWS, TOKENS)), axis=1)
    segments[-1, 11:] = 0
    return q, k, v, jnp.asarray(segments, jnp.int32), jnp.asarray(rng.normal(size=q.shape))


def value_and_gradients(attention, q, k, v, segments, weights):
    def weighted(q, k, v):
        out = attention(q, k, v, segments)
        return jnp.vdot(out, weights), out

    (_, out), gradients = jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return out, gradients


@pytest.mark.parametrize(
    ("mesh", "heads", "is_causal", "window", "cap", "form"),
    [
        (MeshSpec(data=2, context=4), (4, 2), True, None, None, "ring"),
        (MeshSpec(data=2, context=4), (4, 2), True, None, 5.0, "gather"),
        (MeshSpec(data=1, context=8), (2, 1), True, 6, 5.0, "ring"),  # a window over four stretches of two tokens
        (MeshSpec(data=1, context=4), (2, 2), True, 3, None, "ring"),  # nearer than a stretch: one neighbour
        (MeshSpec(data=1, context=4), (2, 2), True, 1, None, "ring"),  # only itself
        (MeshSpec(data=1, fsdp=2, context=4), (2, 2), False, None, None, "ring"),
        (MeshSpec(data=1, context=4), (2, 1), False, 5, None, "ring"),
        (MeshSpec(data=2, context=2, tensor=2), (4, 2), True, 7, None, "ring"),
        (MeshSpec(data=1, context=2, tensor=4), (4, 2), True, None, None, "gather"),  # tensor divides the queries alone
    ],
)
def test_split_attention_is_attention(mesh, heads, is_causal, window, cap, form) -> None:
    arrays = drawn(*heads)
    shape = Shape(is_causal, window, cap, TOKENS)
    expected = jax.jit(lambda *x: value_and_gradients(lambda *y: attend_blocks(*y, shape), *x))(*arrays)
    with jax.set_mesh(build_mesh(mesh)):
        got = jax.jit(lambda *x: value_and_gradients(lambda *y: attend_split(*y, shape, form), *x))(*arrays)
    for name, left, right in zip(("out", "q", "k", "v"), jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        # With a window of one the gradients of queries and keys are zero in mathematics, and rounding here.
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-11 * max(1, np.max(np.abs(right))), err_msg=name)


def test_a_causal_window_sends_keys_to_those_who_see_them_alone() -> None:
    """Of eight stretches of two tokens a window of three reaches two: one send forward, two on the way back."""
    shape, arrays = Shape(True, 3, None, TOKENS), drawn(2, 1)
    with jax.set_mesh(build_mesh(MeshSpec(data=1, context=8))):
        text = jax.jit(lambda *x: attend_split(*x, shape, "ring")).lower(*arrays[:4]).as_text()
    assert text.count("collective_permute") == 3  # keys, values, segment ids, once


def test_the_ring_keeps_no_array_of_all_tokens() -> None:
    """Per device, no array of the compiled ring has as many keys as the row has tokens."""
    shape, arrays = Shape(True, None, None, TOKENS), drawn(2, 1)
    with jax.set_mesh(build_mesh(MeshSpec(data=1, context=8))):
        spread = [jax.device_put(x, jax.sharding.PartitionSpec(None, "context")) for x in arrays[:4]]
        text = jax.jit(lambda *x: attend_split(*x, shape, "ring")).lower(*spread).compile().as_text()
    assert "all-gather" not in text
    assert "collective-permute" in text
