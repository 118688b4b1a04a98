"""A jitted function that is lowered exactly once; a second signature is an error that names the argument.

Reads `errors` and `trees`; `train.step` wraps the train and eval steps with it. A silent second compile costs minutes
and usually means a bug in the input (maxtext 33a1d710c: a batch without its sharding).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh

from jaxml import trees
from jaxml.errors import Faults, RecompileError

Batch: TypeAlias = Mapping[str, Any]

# Columns that say where a row came from; they stay on the host.
PROVENANCE = ("record", "source")


class LoweredOnce:
    """Calls one ahead-of-time compiled program `function(carried, batch)`.

    Arguments:
      name: what errors call the function.
      function: a jitted function.
      carried: the first argument's name, and its tree of ShapeDtypeStructs with shardings.
      place: puts a batch on the devices with its final shardings; of ShapeDtypeStructs it returns such with shardings.
      mesh: put in force while tracing, so that models may constrain activations by mesh axis.
    """

    def __init__(
        self, name: str, function: Any, carried: tuple[str, Any], place: Callable[[Batch], dict[str, Any]], mesh: Mesh
    ):
        self.name, self.num_lowered = name, 0
        self.compiled: Any = None
        self.expected: tuple[Any, Any] = (carried[1], None)
        self.function, self._arguments, self._place, self._mesh = function, (carried[0], "batch"), place, mesh

    def compile(self, batch: Batch) -> float:
        """Lower and compile for batches like this (arrays or ShapeDtypeStructs); returns the seconds it took, 0.0 when
        that was done before. Raises RecompileError for another signature than before."""
        if self.compiled is not None:
            self._refuse_if_different(self.expected[0], batch)
            return 0.0
        started = time.perf_counter()
        self.expected = (self.expected[0], self._place({name: _abstract(column) for name, column in batch.items()}))
        with jax.set_mesh(self._mesh):
            self.compiled = self.function.lower(*self.expected).compile()
        self.num_lowered += 1
        return time.perf_counter() - started

    def __call__(self, carried: Any, batch: Batch) -> Any:
        if self.num_lowered == 0:
            self.compile(batch)
        try:
            return self.compiled(carried, self._place(batch))
        except (TypeError, ValueError):
            # The signature is compared only now: doing it at every step would cost more than a small step takes.
            self._refuse_if_different(carried, batch)
            raise

    def _refuse_if_different(self, carried: Any, batch: Batch) -> None:
        faults = Faults(RecompileError)
        columns = {name: column for name, column in batch.items() if name not in PROVENANCE}
        for name, expected, got in zip(self._arguments, self.expected, (carried, columns), strict=True):
            left, right = trees.flatten(expected), trees.flatten(got)
            for path in [*left, *(path for path in right if path not in left)]:
                old, new = left.get(path), right.get(path)
                if old is None or new is None or _signature(old) != _signature(new) or _is_elsewhere(old, new):
                    faults.add(
                        f"{self.name}, argument {name}.{path}",
                        expected=_describe(old),
                        got=_describe(new),
                        todo="give every step the same shapes, dtypes and shardings, or build a second program",
                    )
        faults.raise_if_any()


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    shape, dtype = _signature(leaf)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=getattr(leaf, "sharding", None))


def _signature(leaf: Any) -> tuple[tuple[int, ...], Any]:
    return tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype)


def _is_elsewhere(expected: jax.ShapeDtypeStruct, got: Any) -> bool:
    """Host arrays and uncommitted ones go where the program wants them."""
    if not isinstance(got, jax.Array) or not got.committed or expected.sharding is None:
        return False
    return not got.sharding.is_equivalent_to(expected.sharding, got.ndim)


def _describe(leaf: Any) -> str:
    if leaf is None:
        return "(absent)"
    shape, dtype = _signature(leaf)
    spec = getattr(getattr(leaf, "sharding", None), "spec", None)
    return f"{dtype}[{','.join(map(str, shape))}]" + (f" sharded {spec}" if spec is not None else "")
