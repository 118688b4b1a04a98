"""Laws of digests: no sharding changes them, every bit and every place counts, plain integers give the same."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxml import trees
from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.train.digest import DIGESTS, digest, digests, to_hex

rng = np.random.default_rng(0)
TREE = {
    "stack": rng.standard_normal((4, 8, 16)).astype(np.float32),
    "table": rng.standard_normal((24, 8)).astype(ml_dtypes.bfloat16),
    "tokens": rng.integers(0, 100, (8, 4), dtype=np.int32),
    "mask": rng.random(8) < 0.5,
    "small": rng.standard_normal((2, 2)).astype(ml_dtypes.float8_e4m3fn),
    "scalar": np.float32(3.0),
    "empty": np.zeros((0, 3), np.float32),
}
# Leaf to the mesh axes of its dimensions; leaves that are not named are replicated.
LAYOUTS = (
    {
        "stack": P(None, "fsdp", "tensor"),
        "table": P(("data", "fsdp")),
        "tokens": P("data", "tensor"),
        "mask": P("data"),
    },
    {"stack": P("data", ("fsdp", "tensor")), "table": P("fsdp", "data"), "mask": P(("data", "fsdp", "tensor"))},
)

jitted = jax.jit(digest)


def hexadecimal(tree: object) -> str:
    return to_hex(jax.device_get(jitted(tree)))


def reference(tree: dict[str, np.ndarray]) -> str:
    """The same in Python's own integers, element by element."""

    def mix(word: int, factor: int, shift: int) -> int:
        return (word ^ (word >> shift)) * factor % 2**32

    total = [0, 0]
    for path, leaf in trees.flatten(tree).items():
        leaf = np.asarray(leaf)
        kind = np.uint32 if leaf.dtype.itemsize >= 4 else np.dtype(f"uint{8 * leaf.dtype.itemsize}")
        words = np.ascontiguousarray(leaf).reshape(-1).view(kind)
        sums = [0, 0]
        for place, word in enumerate(words.tolist()):
            begun = mix(word ^ (place * 0x9E3779B1 % 2**32), 0x85EBCA6B, 16)
            for half, (factor, shift) in enumerate(((0xC2B2AE35, 13), (0x27D4EB2F, 15))):
                mixed = mix(begun, factor, shift)
                sums[half] += mixed ^ (mixed >> 16)
        name = zlib.crc32(path.encode())
        for half, salt in enumerate((name, name ^ 0xFFFFFFFF)):
            total[half] += mix(mix(sums[half] % 2**32 ^ salt, 0x85EBCA6B, 16), 0xC2B2AE35, 13)
    return "".join(f"{part % 2**32:08x}" for part in total)


def test_plain_integers_give_the_same_digest():
    assert hexadecimal(TREE) == reference(TREE)


def test_elements_of_64_bits_count_whole():
    with jax.enable_x64(True):
        wide = {"a": rng.standard_normal((3, 5)), "b": np.arange(4)}
        assert hexadecimal(wide) == reference(wide)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_sharding_changes_a_digest(layout: dict[str, P]):
    mesh = build_mesh(MeshSpec(data=2, fsdp=2, tensor=2))
    shardings = {name: NamedSharding(mesh, layout.get(name, P())) for name in TREE}
    assert hexadecimal(jax.device_put(TREE, shardings)) == reference(TREE)


@given(st.integers(0, 63), st.integers(0, 31))
def test_every_bit_of_every_element_changes_both_halves(index: int, bit: int):
    words = np.arange(64, dtype=np.uint32).reshape(4, 16)
    changed = words.copy()
    changed.flat[index] ^= np.uint32(1 << bit)
    before, after = hexadecimal({"a": words}), hexadecimal({"a": changed})
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]


@given(st.lists(st.integers(0, 63), min_size=2, max_size=8, unique=True), st.integers(0, 31))
def test_the_same_bit_in_several_elements_does_not_cancel(places: list[int], bit: int):
    """As a changed sign or a doubled value does: differences that are the same power of two."""
    words = np.random.default_rng(1).integers(0, 2**32, (4, 16), dtype=np.uint32)
    changed = words.copy()
    changed.flat[places] ^= np.uint32(1 << bit)
    assert hexadecimal({"a": words}) != hexadecimal({"a": changed})


@given(st.tuples(st.integers(0, 63), st.integers(0, 63)).filter(lambda pair: pair[0] != pair[1]))
def test_exchanged_elements_change_it(pair: tuple[int, int]):
    words = np.arange(64, dtype=np.uint32).reshape(4, 16)
    changed = words.copy()
    changed.flat[list(pair)] = words.flat[list(pair[::-1])]
    assert hexadecimal({"a": words}) != hexadecimal({"a": changed})


def test_names_and_signs_of_zero_count():
    one, other = np.zeros(2, np.float32), np.ones(2, np.float32)
    assert hexadecimal({"a": one, "b": other}) != hexadecimal({"a": other, "b": one})
    assert hexadecimal({"a": one, "b": one}) != hexadecimal({"a": one, "c": one})
    assert hexadecimal({"a": one}) != hexadecimal({"a": -one})


def test_a_step_has_one_digest_of_each_kind():
    found = jax.jit(digests)({"tokens": jnp.zeros((2, 3), jnp.int32)}, {"w": jnp.ones(3)}, {"w": jnp.zeros(3)})
    assert tuple(sorted(found)) == tuple(sorted(DIGESTS))
    assert all(value.shape == (2,) and value.dtype == jnp.uint32 for value in found.values())
    assert len({to_hex(np.asarray(value)) for value in found.values()}) == 3
