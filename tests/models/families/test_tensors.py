"""The name map, on a model of two tensors: transposition, stacking, dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jaxml.models.families.tensors import PublishedTensor, by_leaf, to_canonical, to_published

# Rows out of order: they are sorted by the layer that they belong to, not by where they stand.
MAP = (
    PublishedTensor("layer.1", (3, 2), "stack.kernel", 1, is_transposed=True),
    PublishedTensor("bias", (3,), "bias"),
    PublishedTensor("layer.0", (3, 2), "stack.kernel", 0, is_transposed=True),
)
FILES = {
    "layer.0": np.arange(6.0).reshape(3, 2),
    "layer.1": 10 + np.arange(6.0).reshape(3, 2),
    "bias": np.array([7.0, 8.0, 9.0]),
}


def test_kernels_are_transposed_and_layers_stacked_in_order():
    leaves = dict(to_canonical(MAP, FILES.__getitem__, np.float64))
    assert leaves["stack.kernel"].tolist() == [[[0, 2, 4], [1, 3, 5]], [[10, 12, 14], [11, 13, 15]]]
    assert leaves["bias"].tolist() == [7, 8, 9]
    assert [tensor.name for tensor in by_leaf(MAP)["stack.kernel"]] == ["layer.0", "layer.1"]


def test_the_way_back_gives_the_published_arrays():
    published = to_published(MAP, dict(to_canonical(MAP, FILES.__getitem__, np.float64)))
    assert published.keys() == FILES.keys()
    for name, value in FILES.items():
        assert np.array_equal(published[name], value)
        assert published[name].flags.c_contiguous, "safetensors writes contiguous arrays"


@pytest.mark.parametrize("narrow", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_becomes_float32_without_loss(narrow):
    files = {name: (value / 7).astype(narrow) for name, value in FILES.items()}
    published = to_published(MAP, dict(to_canonical(MAP, files.__getitem__, np.float32)))
    for name, value in files.items():
        assert published[name].dtype == np.float32
        assert np.array_equal(published[name].astype(narrow), value)
