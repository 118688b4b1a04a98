"""The quantized decoder: the same function of its dequantized weights, the same through a cache, and no training."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml import keys, trees
from jaxml.compress.weights import quantized_params
from jaxml.errors import ConfigError
from jaxml.models.build import BoundModel
from jaxml.models.cache import empty_cache
from jaxml.models.spec import ClassifierSpec, Quantization
from jaxml.models.unrolled import unrolled_params, unrolled_spec
from tests.models import tiny
from tests.reference import decoder as reference

CAUSAL = ("llama", "gpt2", "gemma")
ROWS = tiny.TOKENS[:2]


@cache
def bound(name: str, scheme: Quantization, is_unrolled: bool = False) -> BoundModel:
    spec = dataclasses.replace(tiny.SPECS[name], quantization=scheme)
    with jax.enable_x64(True):
        return tiny.bind(unrolled_spec(spec) if is_unrolled else spec, "float64")


@cache
def params(name: str) -> Any:
    with jax.enable_x64(True):
        given = tiny.lively_params(tiny.bind(tiny.SPECS[name], "float64"))
        return quantized_params(bound(name, "int8"), given)


def whole(name: str, scheme: Quantization) -> tuple[np.ndarray, np.ndarray]:
    """(features, logits) of one pass over full rows, in float64."""
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), ROWS.shape)

    @jax.jit
    def run(params: Any, *batch: Any) -> Any:
        module = bound(name, scheme).bind(params)
        features, _ = module(*batch)
        return features, module.logits(features)

    with jax.enable_x64(True):
        return jax.device_get(run(params(name), ROWS, positions, np.ones_like(ROWS)))


@pytest.mark.parametrize("name", CAUSAL)
def test_with_int8_weights_alone_it_is_the_numpy_reference_on_the_dequantized_weights(name):
    flat = {path: np.asarray(leaf, np.float64) for path, leaf in trees.flatten(params(name)).items()}
    plain = trees.flatten(tiny.bind(tiny.SPECS[name]).abstract_params)
    for path in plain:
        owner, _, leaf = path.rpartition(".")
        if path not in flat:
            matrix = flat[f"{owner}.values"] * flat[f"{owner}.scales"][..., None]
            flat[path] = matrix if leaf == "table" else np.swapaxes(matrix, -1, -2)
    back = trees.unflatten({path: flat[path] for path in plain})
    positions, segments = np.broadcast_to(np.arange(8), ROWS.shape), np.ones_like(ROWS)
    features = reference.features(tiny.SPECS[name], back, ROWS, positions, segments)
    expected = reference.logits(tiny.SPECS[name], back, features)
    got = whole(name, "int8-weights")[1]
    assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()  # rows are rounded to 16 bits
    # Rounding rows to 8 bits is another function, and not far from it.
    errors = np.abs(whole(name, "int8")[1] - expected).max() / np.abs(expected).max()
    assert 1e-3 < errors < 0.2


@pytest.mark.parametrize("scheme", ["int8", "int8-weights"])
@pytest.mark.parametrize("name", CAUSAL)
def test_tokens_one_by_one_through_a_cache_in_the_decoding_layout_equal_one_pass(name, scheme):
    """In float64, where no activation of the two lies on different sides of a rounding."""
    model = bound(name, scheme, is_unrolled=True)
    with jax.enable_x64(True):
        given = unrolled_params(tiny.SPECS[name], params(name))
        extend = jax.jit(lambda params, *inputs: model.bind(params).extend(*inputs))
        cache, pieces = empty_cache(model.spec, 2, 8, jnp.float64), []
        for start in range(8):
            features, cache = extend(given, ROWS[:, start : start + 1], np.int32(start), cache)
            pieces.append(features)
        got = np.concatenate(pieces, axis=1)
    expected = whole(name, scheme)[0]
    assert np.abs(got - expected).max() < 1e-9 * np.abs(expected).max()


def test_its_leaves_are_int8_with_the_axes_of_what_they_replace():
    model = bound("gemma", "int8")
    leaves, axes = trees.flatten(model.abstract_params), model.logical_axes
    query = axes["blocks"]["0"]["attention"]["query"]
    assert query == {"values": ("layers", "heads", "embed"), "scales": ("layers", "heads")}
    assert axes["embed"]["values"] == axes["head"]["values"] == ("vocab", "embed")
    assert {leaf.dtype for path, leaf in leaves.items() if path.endswith("values")} == {jnp.dtype(jnp.int8)}
    assert leaves["blocks.0.attention.query.values"].shape == (2, 16, 16)
    assert not [path for path in leaves if path.endswith(("kernel", "table"))]
    matrices = sum(leaf.size for path, leaf in leaves.items() if path.endswith("values"))
    assert trees.num_bytes(params("gemma")) < 1.6 * matrices


def test_it_is_not_trained_and_a_classifier_is_not_quantized():
    with pytest.raises(ConfigError, match=r"model\.quantization"):
        bound("llama", "int8").init(keys.root_key(0))
    spec = dataclasses.replace(tiny.SPECS["encoder"], quantization="int8")
    with pytest.raises(ConfigError, match=r"model\.decoder\.quantization"):
        tiny.bind(ClassifierSpec(spec, num_classes=2))
