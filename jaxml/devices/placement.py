"""Host rows to arrays over a mesh that spans several processes: which rows a process needs, and the arrays of them.

Reads no other jaxml file; `recipes.assemble` asks for the rows, `train.step` makes the arrays, `train.guard` reads results.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding


def rows_of_process(sharding: NamedSharding, batch_size: int) -> tuple[int, int]:
    """(lo, hi): the smallest range of rows of a batch that holds all rows that this process's devices need.

    `sharding`: of a column [B] with B = `batch_size`. Devices that split something else than rows (tokens, heads) need the
    same rows, so the ranges of two processes may overlap.
    """
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    slices = [index[0].indices(batch_size) for index in indices if index is not None]
    return min(begin for begin, _, _ in slices), max(end for _, end, _ in slices)


def put_rows(columns: Mapping[str, np.ndarray], shardings: Mapping[str, NamedSharding]) -> dict[str, jax.Array]:
    """Arrays over all processes; each process gives the parts that its own devices hold.

    columns: NumPy arrays of the global shape [B, ...], of which only the rows of `rows_of_process` are read here.
    (`jax.device_put` would first compare whole columns between the processes.)
    """

    def of_column(column: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(column.shape, sharding, lambda index: column[index])

    return {name: of_column(column, shardings[name]) for name, column in columns.items()}


def on_every_host(array: jax.Array) -> np.ndarray:
    """The values of an array, however it is split over processes, in each of them; all have to call it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
