"""Naming, counting and comparing the leaves of pytrees.

Reads no other jaxml file; checkpoints, reports and errors name leaves by these dotted paths, such as
`blocks.0.attention.query.kernel`. Keys of dicts must not contain dots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


def flatten(tree: Any) -> dict[str, Any]:
    """Dotted path to leaf, in JAX's own leaf order: `list(flatten(t).values()) == jax.tree.leaves(t)`.

    >>> flatten({"b": {"x": 1}, "a": (2, 3)})
    {'a.0': 2, 'a.1': 3, 'b.x': 1}
    """
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    flat = {path_name(path): leaf for path, leaf in pairs}
    if len(flat) != len(pairs):
        raise ValueError("two leaves have the same dotted path: a key of the tree contains a dot")
    return flat


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts from dotted paths; the inverse of `flatten` for trees that are dicts all through.

    >>> unflatten({"b.x": 1, "a": 2})
    {'b': {'x': 1}, 'a': 2}
    """
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def path_name(path: tuple[Any, ...]) -> str:
    """The dotted form of a JAX key path: dict keys, attribute names and indices alike."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def num_parameters(tree: Any) -> int:
    """Elements over all leaves; works on arrays and on ShapeDtypeStructs."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def num_bytes(tree: Any) -> int:
    """Bytes over all leaves; works on arrays and on ShapeDtypeStructs (one logical copy)."""
    return sum(math.prod(leaf.shape) * _itemsize(leaf.dtype) for leaf in jax.tree.leaves(tree))


def _itemsize(dtype: Any) -> int:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).size * 4
    return np.dtype(dtype).itemsize


@dataclass(frozen=True)
class LeafDifference:
    """One leaf in which two trees differ. `expected` and `got` describe it (`float32[2,3]`, or `(absent)`).

    `max_abs_difference` is None when the shapes or dtypes do not match; it is 0.0 for leaves whose values are equal and
    whose bits are not (0.0 and -0.0), and NaN where one side is NaN.
    """

    path: str
    expected: str
    got: str
    max_abs_difference: float | None

    def __str__(self) -> str:
        if self.max_abs_difference is None:
            return f"{self.path}: expected {self.expected}, got {self.got}"
        return f"{self.path}: {self.expected} differs by up to {self.max_abs_difference:.3g}"


def compare(expected: Any, got: Any) -> list[LeafDifference]:
    """Every leaf that is not equal bit for bit, in shape, dtype and values (empty when the trees are the same).

    >>> [str(d) for d in compare({"w": np.zeros(2)}, {"w": np.ones(2)})]
    ['w: float64[2] differs by up to 1']
    """
    left, right = flatten(expected), flatten(got)
    differences = []
    for path in [*left, *(path for path in right if path not in left)]:
        if path not in left or path not in right:
            texts = [_describe(side[path]) if path in side else "(absent)" for side in (left, right)]
            differences.append(LeafDifference(path, texts[0], texts[1], None))
            continue
        a, b = _to_numpy(left[path]), _to_numpy(right[path])
        if a.shape != b.shape or a.dtype != b.dtype:
            differences.append(LeafDifference(path, _describe(a), _describe(b), None))
        elif a.tobytes() != b.tobytes():
            differences.append(LeafDifference(path, _describe(a), _describe(b), _max_abs_difference(a, b)))
    return differences


def first_nonfinite(tree: Any) -> str | None:
    """The path of the first leaf (in `flatten` order) that holds an infinity or a NaN; None when all are finite."""
    for path, leaf in flatten(tree).items():
        array = _to_numpy(leaf)
        if jax.dtypes.issubdtype(array.dtype, np.inexact) and not np.isfinite(array).all():
            return path
    return None


def _to_numpy(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _describe(leaf: Any) -> str:
    array = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _max_abs_difference(a: np.ndarray, b: np.ndarray) -> float:
    wide = np.complex128 if jax.dtypes.issubdtype(a.dtype, np.complexfloating) else np.float64
    with np.errstate(invalid="ignore"):
        return float(np.max(np.abs(a.astype(wide) - b.astype(wide))))
