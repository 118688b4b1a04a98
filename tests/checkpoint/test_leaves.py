"""What is described is what is there, and host copies share no memory with a state that is about to be donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml import trees
from jaxml.checkpoint.leaves import describe_leaves, restore_target, to_host
from jaxml.errors import CheckpointError


def test_host_copies_equal_the_arrays_and_share_no_memory_with_them() -> None:
    parts = {"params": {"a": jnp.arange(5.0), "b": np.ones(3, np.int32)}, "opt_state": (jnp.int32(3),)}
    copies = to_host(parts)
    assert trees.compare(parts, copies) == []
    for leaf, copy in zip(jax.tree.leaves(parts), jax.tree.leaves(copies), strict=True):
        assert isinstance(copy, np.ndarray)
        assert not np.shares_memory(np.asarray(leaf), copy)


def test_leaves_are_described_by_path_shape_and_dtype_and_keys_are_refused() -> None:
    tree = {"b": (jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),), "a": np.zeros((), np.int64)}
    assert describe_leaves(tree) == {"a": [[], "int64"], "b.0": [[2, 3], "bfloat16"]}
    with pytest.raises(CheckpointError, match=r"leaf dropout\.key"):
        describe_leaves({"dropout": {"key": jax.random.key(0)}})


def test_a_leaf_without_sharding_is_asked_for_as_a_numpy_array_of_no_memory() -> None:
    target = restore_target(jax.ShapeDtypeStruct((1 << 40,), jnp.bfloat16))
    assert isinstance(target, np.ndarray)
    assert (target.shape, target.dtype, target.strides) == ((1 << 40,), jnp.bfloat16, (0,))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)
    assert restore_target(placed) is placed
