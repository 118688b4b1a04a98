"""The values that a traced program names, in program order: what tells two runs of one program apart, value by value.

Reads nothing of jaxml but `trees`; `prove.parting` compares what it returns. A program is traced to a jaxpr and interpreted
(https://docs.jax.dev/en/latest/notebooks/Writing_custom_interpreters_in_Jax.html) inside one `jit`, so that a sharded
program stays sharded. Calls, rematerialised blocks and custom derivatives are entered; of a scan the values come stacked
by iteration. What happens inside `shard_map`, `cond` and `while` has no names of its own here: its result does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

NAME = "name"  # the primitive of `jax.ad_checkpoint.checkpoint_name`
# Primitives that call a jaxpr once, and where they keep it.
CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
NAMING_FILE = "models/named.py"  # what calls it makes the value


@dataclass(frozen=True)
class NamedValue:
    """`scans`: the loops that it is made in, outermost first, by number; `value` has one leading axis for each."""

    name: str
    made_by: str
    scans: tuple[int, ...]
    value: np.ndarray


def named_values(function: Callable[..., Any], arguments: Sequence[Any], mesh: Mesh) -> list[NamedValue]:
    """Every named value that the results of `function(*arguments)` need, in program order; `arguments` are arrays, placed
    on the devices of `mesh`, which is in force while it is traced."""
    return naming(function, arguments, mesh)(arguments)


def naming(
    function: Callable[..., Any], arguments: Sequence[Any], mesh: Mesh
) -> Callable[[Sequence[Any]], list[NamedValue]]:
    """The same for any arguments of these shapes: traced once, and compiled at the first call."""
    with jax.set_mesh(mesh):
        closed = jax.make_jaxpr(function)(*arguments)
    interpreter = _Interpreter()

    def run(flat: list[Any]) -> list[Any]:
        interpreter.found.clear()
        interpreter.evaluate(closed.jaxpr, closed.consts, flat)
        return [value for *_, value in interpreter.found]

    jitted = jax.jit(run)

    def values_of(arguments: Sequence[Any]) -> list[NamedValue]:
        with jax.set_mesh(mesh):
            arrays = jax.device_get(jitted(jax.tree.leaves(arguments)))
        return [
            NamedValue(name, made_by, scans, np.asarray(array))
            for (name, made_by, scans, _), array in zip(interpreter.found, arrays, strict=True)
        ]

    return values_of


class _Interpreter:
    """Evaluates a jaxpr while collecting (name, made by, scans, value)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, tuple[int, ...], Any]] = []
        self._scans: tuple[int, ...] = ()
        self._num_scans = 0

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        values |= dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, arguments, strict=True))
        for equation in _needed(jaxpr):
            results = self._results(equation, [read(atom) for atom in equation.invars])
            values |= dict(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _results(self, equation: Any, inputs: list[Any]) -> list[Any]:
        primitive, parameters = equation.primitive.name, equation.params
        if primitive == NAME:
            self.found.append((parameters["name"], _made_by(equation), self._scans, inputs[0]))
            return inputs
        if primitive in CALLS and _has_names(parameters[CALLS[primitive]]):
            inner = parameters[CALLS[primitive]]
            return self.evaluate(_open(inner), getattr(inner, "consts", ()), inputs)
        if primitive == "scan" and _has_names(parameters["jaxpr"]):
            return self._scan(equation, inputs)
        with equation.ctx.manager:
            results = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(parameters))
        return list(results) if equation.primitive.multiple_results else [results]

    def _scan(self, equation: Any, inputs: list[Any]) -> list[Any]:
        parameters = equation.params
        body, inside = parameters["jaxpr"], _open(parameters["jaxpr"])
        # Read from the shapes, because the parameters that say so differ between versions of JAX: what a body gets or
        # gives one of each iteration has a dimension more outside.
        num_carry = sum(_rank(o) == _rank(i) for o, i in zip(equation.outvars, inside.outvars, strict=True))
        num_consts = sum(_rank(o) == _rank(i) for o, i in zip(equation.invars, inside.invars, strict=True)) - num_carry
        consts, carry, stacked = inputs[:num_consts], inputs[num_consts:][:num_carry], inputs[num_consts + num_carry :]
        outside, around = self.found, self._scans
        self._num_scans += 1
        self._scans = (*around, self._num_scans)
        made: list[tuple[str, str, tuple[int, ...], Any]] = []

        def one(carry: list[Any], xs: list[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            self.found = []
            results = self.evaluate(inside, getattr(body, "consts", ()), [*consts, *carry, *xs])
            made[:] = self.found
            return results[:num_carry], (results[num_carry:], [value for *_, value in self.found])

        carry, (results, arrays) = jax.lax.scan(
            one, carry, stacked, length=parameters["length"], reverse=parameters["reverse"]
        )
        self.found, self._scans = outside, around
        for (name, made_by, scans, _), array in zip(made, arrays, strict=True):
            self.found.append((name, made_by, scans, array))
        return [*carry, *results]


def _needed(jaxpr: Any) -> list[Any]:
    """The equations that the results need: a value that is made and thrown away is no part of the run."""
    wanted = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if any(variable in wanted for variable in equation.outvars):
            kept.append(equation)
            wanted |= {atom for atom in equation.invars if not isinstance(atom, core.Literal)}
    return kept[::-1]


def _has_names(jaxpr: Any) -> bool:
    for equation in _open(jaxpr).eqns:
        inner = equation.primitive.name == NAME or any(
            _has_names(equation.params[where])
            for primitive, where in {**CALLS, "scan": "jaxpr"}.items()
            if equation.primitive.name == primitive
        )
        if inner:
            return True
    return False


def _rank(atom: Any) -> int:
    return len(atom.aval.shape)


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _made_by(equation: Any) -> str:
    """The line of the program that named the value: what called `models.named`, or else `checkpoint_name`."""
    traceback = equation.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    naming = [index for index, frame in enumerate(frames) if frame.file_name.endswith(NAMING_FILE)]
    after = frames[naming[0] + 1 :] if naming else frames
    own = (frame for frame in after if "site-packages" not in frame.file_name and not frame.file_name.startswith("<"))
    frame = next(own, None)
    if frame is None:
        return "an unknown line"
    folder, _, inside = frame.file_name.rpartition("/jaxml/")
    return f"{'jaxml/' + inside if folder else frame.file_name}, line {frame.line_num}"
