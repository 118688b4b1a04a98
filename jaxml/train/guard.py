"""Decides whether a loss is a spike and whether float16 overflows for ever, and finds out what made a step not finite.
Pure: writes and stops nothing.

Reads `train.spec`, `train.step`, `tasks.contract`, `numerics.spec`, `trees`; `recipes.guarding` acts on it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxml import trees
from jaxml.devices.placement import on_every_host
from jaxml.numerics.spec import LossScaleSpec
from jaxml.tasks.contract import Batch
from jaxml.train.spec import GuardSpec
from jaxml.train.step import Program

# The median absolute deviation of a normal distribution is its standard deviation divided by this.
MAD_TO_DEVIATION = 1.4826
# Losses that hardly vary must not make every wobble a spike: the deviation is taken to be at least this share of the
# median.
SMALLEST_DEVIATION = 1e-3


class SpikeDetector:
    """Is a loss far above the recent ones? Deviations are robust: median and MAD over the last `spike_window` good
    losses.

    It decides once the window is full. Losses that spike or are not finite stay out of the window, so one bad stretch
    does not raise the bar for the next. Rebuild it after a resume from the losses logged so far, in order.

    >>> detector = SpikeDetector(GuardSpec(spike_threshold=5.0, spike_window=8), past_losses=[2.0, 2.1] * 4)
    >>> detector.observe(2.2), detector.observe(9.0)
    (False, True)
    """

    def __init__(self, spec: GuardSpec, past_losses: Iterable[float] = ()):
        self._threshold = spec.spike_threshold
        self._window: deque[float] = deque(maxlen=spec.spike_window)
        for loss in past_losses:
            self.observe(loss)

    def observe(self, loss: float) -> bool:
        """Whether `loss` is a spike (never, with a threshold of 0); remembers it if it is not."""
        is_spike = self._threshold > 0 and self.deviations(loss) > self._threshold
        if not is_spike and math.isfinite(loss):
            self._window.append(float(loss))
        return is_spike

    def deviations(self, loss: float) -> float:
        """How many robust standard deviations `loss` lies above the median of the window (0 until that is full)."""
        if len(self._window) < (self._window.maxlen or 0) or not math.isfinite(loss):
            return 0.0
        losses = np.asarray(self._window)
        median = float(np.median(losses))
        deviation = MAD_TO_DEVIATION * float(np.median(np.abs(losses - median)))
        return float(loss - median) / max(deviation, SMALLEST_DEVIATION * abs(median), float(np.finfo(np.float64).tiny))


def endless_overflow(metrics: Mapping[str, Any], scaling: LossScaleSpec, max_skips: int) -> str:
    """Why a run in float16 cannot go on after a step with `is_overflow`; "" while lowering the scale may still help.

    >>> endless_overflow({"loss_scale": 4.0, "skipped_in_a_row": 2}, LossScaleSpec(), max_skips=10)
    ''
    """
    scale, in_a_row = metrics["loss_scale"], metrics["skipped_in_a_row"]
    if scale <= scaling.smallest:
        return f"the gradient overflows float16 at a loss scale of {scale:.10g}, the smallest"
    if in_a_row > max_skips:
        return f"the gradient overflowed float16 in {in_a_row} steps in a row, down to a loss scale of {scale:.10g}"
    return ""


@dataclass(frozen=True)
class Diagnosis:
    """What was not finite in a step.

    `leaf`: the first parameter, in the order of `trees.flatten`, whose gradient was not; "" when only the loss was.
    `leaves`: how many there were. `term`: the first loss term that was not; "" when all were finite and only the
    gradient was not. `rows`: the rows of the batch whose own loss, or else whose own gradient, is not finite; empty
    when no row alone reproduces it. `records`: (source, record) of these rows.
    """

    leaf: str
    leaves: int
    term: str
    rows: tuple[int, ...]
    records: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        names = ", ".join(f"record {record} of source {source}" for source, record in self.records[:8])
        more = f" and {len(self.records) - 8} more" if len(self.records) > 8 else ""
        leaf = f"gradient of {self.leaf} (first of {self.leaves} leaves)" if self.leaf else "no gradient"
        return f"not finite: {leaf}; loss term: {self.term or 'none'}; from {names + more or 'no single record'}"


def diagnose(program: Program, params: Any, batch: Mapping[str, np.ndarray], metrics: Mapping[str, Any]) -> Diagnosis:
    """What made the step of `batch` not finite, from its `metrics` and from `params` at hand
    (`StepEvent.suspect_params`).

    Compiles the task's `row_losses` on the first call that needs it, and a pass over single rows only if no row's loss
    but some gradient is not finite. Dropout is off in both.
    """
    norms = dict(zip(trees.flatten(program.abstract_state["params"]), metrics["leaf_grad_norms"], strict=True))
    bad_leaves = [path for path, norm in norms.items() if not math.isfinite(norm)]
    terms = [name.removeprefix("loss/") for name in metrics if name.startswith("loss/")]
    bad_terms = [name for name in terms if not math.isfinite(metrics[f"loss/{name}"])]

    def row_losses(params: Any, rows: Batch) -> jax.Array:
        return program.task.row_losses(program.bound.bind(params), rows)

    with jax.set_mesh(program.mesh):
        rows = bad_rows(row_losses, params, program.put(batch))
    return Diagnosis(
        leaf=bad_leaves[0] if bad_leaves else "",
        leaves=len(bad_leaves),
        term=bad_terms[0] if bad_terms else "",
        rows=rows,
        records=tuple((int(batch["source"][row]), int(batch["record"][row])) for row in rows),
    )


def bad_rows(row_losses: Callable[[Any, Batch], Float[Array, " B"]], params: Any, batch: Batch) -> tuple[int, ...]:
    """The rows whose `row_losses(params, batch)` is not finite; if there is none, those whose gradient of it is not."""
    losses_B = on_every_host(jax.jit(row_losses)(params, batch))
    if not np.isfinite(losses_B).all():
        return tuple(np.flatnonzero(~np.isfinite(losses_B)).tolist())

    def gradient_size(params: Any, row: Batch) -> jax.Array:
        one_row = {name: column[None] for name, column in row.items()}
        gradients = jax.grad(lambda params: row_losses(params, one_row)[0])(params)
        return jax.tree.reduce(jnp.add, jax.tree.map(lambda leaf: jnp.sum(jnp.abs(leaf)), gradients))

    # One row after the other: this runs once, after a failure, and must fit beside the state.
    every_row = jax.jit(lambda params, batch: jax.lax.map(lambda row: gradient_size(params, row), batch))
    return tuple(np.flatnonzero(~np.isfinite(on_every_host(every_row(params, batch)))).tolist())
