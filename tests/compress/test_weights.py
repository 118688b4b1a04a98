"""From a model's parameters to those of its quantized form: which leaves are made of which, and which are left alone."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxml import trees
from jaxml.compress.weights import quantized_params
from jaxml.numerics.quantized import dequantize
from tests.models import tiny

BOUND = 0.51 * (1 + 2**-7) / 127  # half a step, of the largest magnitude of the channel


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "float32"), ("gemma", "float32"), ("llama", "bfloat16")])
def test_every_matrix_is_near_what_it_was_and_every_other_leaf_is_what_it_was(name, dtype):
    spec = tiny.SPECS[name]
    params = tiny.lively_params(tiny.bind(spec, dtype))
    model = tiny.bind(dataclasses.replace(spec, quantization="int8"), dtype)
    made = quantized_params(model, params)
    described = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (made, model.abstract_params)]
    assert described[0] == described[1]
    before, after = trees.flatten(params), trees.flatten(made)
    for path, leaf in before.items():
        owner, _, kind = path.rpartition(".")
        if f"{owner}.values" not in after or kind == "bias":
            assert np.asarray(after[path]).tobytes() == np.asarray(leaf).tobytes()
            continue
        back = np.asarray(dequantize(after[f"{owner}.values"], after[f"{owner}.scales"]))
        matrix = np.asarray(leaf, np.float32)
        matrix = matrix if kind == "table" else np.swapaxes(matrix, -1, -2)
        assert (np.abs(back - matrix) <= BOUND * np.abs(matrix).max(-1, keepdims=True)).all()
    assert "positions.table" not in before or "positions.table" in after
    assert trees.num_bytes(made) < trees.num_bytes(params)
