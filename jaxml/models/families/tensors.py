"""How the tensors of a published checkpoint and the leaves of canonical parameters become each other.

Reads no other jaxml file and no jax; each family lists its tensors with `PublishedTensor`, `checkpoint.hf` checks files
against that list, and `recipes.importing` builds parameters from it. One list serves both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class PublishedTensor:
    """One tensor of a published checkpoint, with its shape there, and the canonical leaf that it fills.

    row: which row of a stacked leaf (None: the leaf is not stacked). is_transposed: published as (out, in), as PyTorch
    stores a linear layer, where the canonical kernel is (in, out).
    """

    name: str
    shape: tuple[int, ...]
    leaf: str
    row: int | None = None
    is_transposed: bool = False

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        """The shape of the leaf, or of one row of it."""
        return self.shape[::-1] if self.is_transposed else self.shape


def by_leaf(tensors: Sequence[PublishedTensor]) -> dict[str, list[PublishedTensor]]:
    """Dotted leaf path to the tensors that fill it, in the order of the rows."""
    groups: dict[str, list[PublishedTensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.leaf, []).append(tensor)
    return {leaf: sorted(group, key=lambda tensor: tensor.row or 0) for leaf, group in groups.items()}


def to_canonical(
    tensors: Sequence[PublishedTensor], read: Callable[[str], np.ndarray], dtype: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """(dotted leaf path, leaf in `dtype`) for every leaf; one published tensor at a time is held beside it."""
    for leaf, group in by_leaf(tensors).items():
        is_stacked = group[0].row is not None
        shape = (len(group), *group[0].canonical_shape) if is_stacked else group[0].canonical_shape
        value = np.empty(shape, dtype)
        for index, tensor in enumerate(group):
            published = read(tensor.name)
            target = value[index] if is_stacked else value
            target[...] = published.T if tensor.is_transposed else published
        yield leaf, value


def to_published(tensors: Sequence[PublishedTensor], leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensor name to array from dotted leaf paths: the inverse of `to_canonical`."""
    published = {}
    for tensor in tensors:
        value = leaves[tensor.leaf] if tensor.row is None else leaves[tensor.leaf][tensor.row]
        published[tensor.name] = np.ascontiguousarray(value.T if tensor.is_transposed else value)
    return published
