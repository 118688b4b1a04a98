"""Maps the logical axes of arrays to mesh axes: one table for parameters, one rule for batches.

Reads `trees` and `errors`; `models` names the logical axes, `train.step` lays out state and batches with these. A mesh
axis takes at most one dimension of a parameter: the first logical axis of its preference list that the leaf has, that
no earlier mesh axis took, and that it divides. So tensor (Shoeybi et al. 2019, arXiv:1909.08053) splits what a block
computes side by side, heads and hidden units, and fsdp (ZeRO stage 3: Rajbhandari et al. 2020) splits matrices along
`embed`. `context` splits no parameter: it splits the tokens of a batch. New axes (expert, stage) are new rows of the
table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxml import trees
from jaxml.errors import DeviceError, Faults

LOGICAL_AXES = ("layers", "vocab", "embed", "heads", "kv_heads", "mlp", "position", "classes")

# Mesh axis -> logical axes that it may split, the preferred one first.
PARAMETER_TABLE: dict[str, tuple[str, ...]] = {
    "tensor": ("heads", "kv_heads", "mlp", "vocab"),
    "fsdp": ("embed", "vocab", "mlp", "heads", "kv_heads"),
}
# Mesh axes that split the rows of a batch, the slowest first; the one that splits the tokens of a row; the one that
# splits what a layer computes side by side.
BATCH_AXES = ("data", "fsdp")
TOKEN_AXIS = "context"
WIDTH_AXIS = "tensor"


def check_table(table: dict[str, tuple[str, ...]]) -> None:
    """Raises DeviceError for a table that two axes of it would fight over, or that names unknown or repeated axes."""
    faults = Faults(DeviceError)
    first_choice: dict[str, str] = {}
    for mesh_axis, preferences in table.items():
        for name in preferences:
            if name not in LOGICAL_AXES or preferences.count(name) > 1:
                faults.add(
                    f"sharding table, mesh axis {mesh_axis!r}",
                    expected=f"each of {', '.join(LOGICAL_AXES)} at most once",
                    got=repr(name),
                    todo="correct PARAMETER_TABLE, or add the logical axis to LOGICAL_AXES",
                )
        if preferences and preferences[0] in first_choice:
            faults.add(
                f"sharding table, mesh axis {mesh_axis!r}",
                expected="a first choice that no other mesh axis has",
                got=f"{preferences[0]!r}, the first choice of {first_choice[preferences[0]]!r} too",
                todo="put another logical axis first",
            )
        elif preferences:
            first_choice[preferences[0]] = mesh_axis
    faults.raise_if_any()


check_table(PARAMETER_TABLE)


def leaf_sharding(logical_axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """The sharding of one parameter; a mesh axis that divides none of its candidate dimensions leaves it replicated.

    Raises DeviceError when the axes do not fit the shape, or when a logical axis names two dimensions (a collision).
    """
    partition, _ = _partition(tuple(logical_axes), tuple(shape), mesh, PARAMETER_TABLE)
    return NamedSharding(mesh, partition)


def tree_shardings(logical_axes: Any, abstract: Any, mesh: Mesh) -> tuple[Any, list[str]]:
    """(tree of NamedShardings, notes): `leaf_sharding` for every leaf; a note names each leaf left whole and why.

    `logical_axes` has the structure of `abstract` with a tuple of axis names for each leaf.
    """
    notes: list[str] = []

    def place(path: tuple[Any, ...], axes: tuple[str | None, ...], leaf: Any) -> NamedSharding:
        partition, leaf_notes = _partition(axes, tuple(leaf.shape), mesh, PARAMETER_TABLE)
        notes.extend(f"{trees.path_name(path)}: {note}" for note in leaf_notes)
        return NamedSharding(mesh, partition)

    shardings = jax.tree_util.tree_map_with_path(place, logical_axes, abstract, is_leaf=lambda x: isinstance(x, tuple))
    return shardings, notes


def _partition(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh, table: dict[str, tuple[str, ...]]
) -> tuple[PartitionSpec, list[str]]:
    named = [axis for axis in axes if axis is not None]
    if len(axes) != len(shape) or len(set(named)) != len(named) or not set(named) <= set(LOGICAL_AXES):
        raise DeviceError(
            "logical axes of a parameter",
            expected=f"one distinct name of {', '.join(LOGICAL_AXES)}, or None, for each of {len(shape)} dimensions",
            got=f"{axes} for shape {shape}",
            todo="correct the `logical` metadata where the parameter is made",
        )
    placed: list[str | None] = [None] * len(shape)
    notes = []
    for mesh_axis, preferences in table.items():
        size = mesh.shape.get(mesh_axis, 1)
        wanted = [axes.index(name) for name in preferences if name in axes]
        free = [dim for dim in wanted if placed[dim] is None]
        fitting = [dim for dim in free if shape[dim] % size == 0]
        if size > 1 and fitting:
            placed[fitting[0]] = mesh_axis
        elif size > 1 and free:
            dims = ", ".join(f"{axes[dim]}={shape[dim]}" for dim in free)
            notes.append(f"replicated, {mesh_axis}={size} divides none of {dims}")
    while placed and placed[-1] is None:  # P("x", None) and P("x") would count as different shardings
        placed.pop()
    return PartitionSpec(*placed), notes


def batch_sharding(mesh: Mesh, ndim: int) -> NamedSharding:
    """Of a column of the batch, [B], [B, T] or [B, T, ...]: rows split over all of `BATCH_AXES` and tokens over
    `TOKEN_AXIS`; a scalar (`ndim` 0) is replicated."""
    return NamedSharding(mesh, _batch_partition(mesh.shape, ndim))


def constrain_batch(x: jax.Array, mesh: Mesh | None = None) -> jax.Array:
    """Inside jit: pins rows and tokens of `x` [B], [B, T] or [B, T, ...] to their mesh axes, so that the compiler gathers
    weights and never activations.

    With `mesh` None the mesh that `jax.set_mesh` put in force is used. Without one, and for rows that the batch axes do
    not divide, `x` is returned as it is; tokens that the token axis does not divide stay whole.
    """
    sizes = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape
    if not has_batch_axes(sizes) or x.ndim == 0 or x.shape[0] % math.prod(sizes[axis] for axis in BATCH_AXES):
        return x
    is_whole = x.ndim > 1 and x.shape[1] % sizes.get(TOKEN_AXIS, 1)
    partition = _batch_partition(sizes, 1 if is_whole else x.ndim)
    return jax.lax.with_sharding_constraint(x, partition if mesh is None else NamedSharding(mesh, partition))


def split_heads(num_heads: int, num_kv_heads: int) -> str | None:
    """The mesh axis in force that splits attention by heads; None where it divides one of the two numbers not (heads are
    then gathered: each device computes them all)."""
    size = axis_size(WIDTH_AXIS)
    return WIDTH_AXIS if size > 1 and num_heads % size == 0 and num_kv_heads % size == 0 else None


def constrain_heads(x_BTNH: jax.Array, axis: str | None) -> jax.Array:
    """Inside jit: pins heads, [B, T, N, H], to the mesh axis that `split_heads` chose, and rows and tokens to theirs; of
    heads that it does not split every device has all. Without `WIDTH_AXIS` on the mesh in force `x_BTNH` as it is."""
    sizes = jax.sharding.get_abstract_mesh().shape
    if sizes.get(WIDTH_AXIS, 1) == 1:
        return x_BTNH
    rows, tokens = BATCH_AXES, TOKEN_AXIS if sizes.get(TOKEN_AXIS, 1) > 1 else None
    if x_BTNH.shape[0] % math.prod(sizes[axis] for axis in BATCH_AXES) or x_BTNH.shape[1] % sizes.get(TOKEN_AXIS, 1):
        return x_BTNH
    return jax.lax.with_sharding_constraint(x_BTNH, PartitionSpec(rows, tokens, axis))


def axis_size(axis: str) -> int:
    """Devices along an axis of the mesh that `jax.set_mesh` put in force; 1 where it has none of that name."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1)


def has_batch_axes(names: Iterable[str]) -> bool:
    """Whether all of `BATCH_AXES` are among the axis names of a mesh."""
    return set(BATCH_AXES) <= set(names)


def _batch_partition(sizes: Mapping[str, int], ndim: int) -> PartitionSpec:
    if ndim == 0:
        return PartitionSpec()
    return (
        PartitionSpec(BATCH_AXES, TOKEN_AXIS)
        if ndim > 1 and sizes.get(TOKEN_AXIS, 1) > 1
        else PartitionSpec(BATCH_AXES)
    )
