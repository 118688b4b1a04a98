"""The training loop: yields one event a step and owns no input or output.

Reads `train.step`; `recipes.train` consumes the events: it logs, saves, evaluates, guards and draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxml.train.state import State
from jaxml.train.step import Metrics, to_host


@runtime_checkable
class Source(Protocol):
    """Where batches come from: prepared data, a generator of them, live data."""

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        """The global batch of update number `step` (0-based); called once a step, in order."""
        ...


@runtime_checkable
class Steps(Protocol):
    """What the loop needs of a `train.step.Program`."""

    @property
    def train_step(self) -> Callable[[State, Mapping[str, Any]], tuple[State, Metrics]]:
        """(state, batch) -> (new state, metrics); dispatches and does not wait."""
        ...


@dataclass(frozen=True)
class StepEvent:
    """What happened in one update.

    `step`: updates done, this one included, as in `state["step"]`; its batch was `source.batch(step - 1)`.
    `metrics`: Python numbers, and `leaf_grad_norms` as an array (see `train.step.train_step`).
    `data_wait_s`: seconds that the loop waited for this batch. `step_s`: seconds that it spent on dispatching this step
    and on waiting for its results. Summed over events, with the consumer's own time, they are the wall time.
    `state`: the state after `step`, where `holds(step)` says so and in the last event; else None, because the device is
    already at work on the next step. The next step donates it: it is valid until the loop goes on.
    `suspect_params`: of a step that was not finite, the newest parameters at hand (that step left them as they were;
    one later update may be in them), for `guard.diagnose`; valid as long as `state`.
    """

    step: int
    metrics: dict[str, Any]
    data_wait_s: float
    step_s: float
    batch: Mapping[str, np.ndarray]
    state: State | None
    suspect_params: Any


def run_steps(
    program: Steps,
    state: State,
    source: Source,
    first_step: int,
    last_step: int,
    holds: Callable[[int], bool] = lambda step: False,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[StepEvent]:
    """Run updates number `first_step` to `last_step - 1`; `state` is donated to the first of them.

    Between holds the next step is dispatched before the metrics of the one before are fetched, so the device does not
    wait for the consumer. `should_stop` is polled between steps; then, as at the end, the last event carries the state.
    When it says so before the first step there is no event and `state` stays valid.
    """
    pending: _Dispatched | None = None
    for number in range(first_step, last_step):
        if should_stop():
            break
        began = time.perf_counter()
        batch = source.batch(number)
        received = time.perf_counter()
        state, metrics = program.train_step(state, batch)
        dispatch_s = time.perf_counter() - received
        previous, pending = pending, _Dispatched(number + 1, batch, received - began, dispatch_s, metrics)
        if previous is not None:
            yield previous.event(state, has_state=False)
        if holds(number + 1):
            yield pending.event(state, has_state=True)
            pending = None
    if pending is not None:
        yield pending.event(state, has_state=True)


@dataclass(frozen=True)
class _Dispatched:
    """A step that the device may still be working on."""

    step: int
    batch: Mapping[str, np.ndarray]
    data_wait_s: float
    dispatch_s: float
    metrics: Metrics

    def event(self, newest: State, has_state: bool) -> StepEvent:
        began = time.perf_counter()
        metrics = to_host(self.metrics)
        return StepEvent(
            step=self.step,
            metrics=metrics,
            data_wait_s=self.data_wait_s,
            step_s=self.dispatch_s + time.perf_counter() - began,
            batch=self.batch,
            state=newest if has_state else None,
            suspect_params=None if metrics["is_finite"] else newest["params"],
        )
