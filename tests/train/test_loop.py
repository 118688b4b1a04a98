"""The order in which the loop dispatches, fetches and yields; and that it is the plain sequence of steps."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from jaxml import trees
from jaxml.train.loop import run_steps
from tests.train import tiny


class Metric:
    """A device scalar that says when it is fetched."""

    def __init__(self, log: list[str], name: str, value: float):
        self.log, self.name, self.value = log, name, value

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.log.append(self.name)
        return np.asarray(self.value)


class FakeProgram:
    """Counts in its state; logs `dispatch n` and `fetch n`; step `broken` is not finite."""

    def __init__(self, broken: int | None = None):
        self.log: list[str] = []
        self.broken = broken

    def train_step(self, state: dict, batch: dict) -> tuple[dict, dict]:
        step = state["step"] + 1
        self.log.append(f"dispatch {step}")
        metrics = {
            "loss": Metric(self.log, f"fetch {step}", float(batch["tokens"])),
            "is_finite": np.asarray(step != self.broken),
        }
        return {"step": step, "params": f"params after {step}"}, metrics


class Count:
    """The batch of step n holds n."""

    def __init__(self, delay_s: float = 0.0):
        self.delay_s = delay_s

    def batch(self, step: int) -> dict:
        time.sleep(self.delay_s)
        return {"tokens": np.asarray(step), "source": np.array([1]), "record": np.array([step])}


def start(step: int = 0) -> dict:
    return {"step": step, "params": "params"}


def run(program: Any, *args: Any, **options: Any) -> list:
    return list(run_steps(program, start(args[0]), Count(), *args, **options))


def test_the_next_step_is_dispatched_before_the_metrics_of_this_one_are_fetched():
    program = FakeProgram()
    events = run(program, 0, 3)
    assert program.log == ["dispatch 1", "dispatch 2", "fetch 1", "dispatch 3", "fetch 2", "fetch 3"]
    assert [event.step for event in events] == [1, 2, 3]
    assert [event.metrics["loss"] for event in events] == [0, 1, 2]
    assert [event.batch["tokens"] for event in events] == [0, 1, 2]


def test_a_step_that_holds_carries_its_own_state_and_is_fetched_before_the_next():
    program = FakeProgram()
    events = run(program, 0, 4, holds=lambda step: step == 2)
    assert program.log[:5] == ["dispatch 1", "dispatch 2", "fetch 1", "fetch 2", "dispatch 3"]
    assert [event.state and event.state["step"] for event in events] == [None, 2, None, 4]


def test_the_loop_drains_when_it_should_stop_and_the_last_event_has_the_state():
    answers = iter([False, False, True])
    program = FakeProgram()
    events = run(program, 0, 100, should_stop=lambda: next(answers))
    assert [event.step for event in events] == [1, 2]
    assert events[-1].state["step"] == 2
    assert run(FakeProgram(), 0, 5, should_stop=lambda: True) == []


def test_a_run_goes_on_at_its_first_step():
    events = run(FakeProgram(), 7, 9)
    assert [(event.step, int(event.batch["tokens"])) for event in events] == [(8, 7), (9, 8)]
    assert run(FakeProgram(), 9, 9) == []


def test_a_step_that_is_not_finite_brings_the_newest_parameters_and_its_records():
    events = run(FakeProgram(broken=2), 0, 4)
    assert [event.suspect_params for event in events] == [None, "params after 3", None, None]
    source, record = events[1].batch["source"], events[1].batch["record"]
    assert (source.tolist(), record.tolist()) == ([1], [1])


def test_the_times_of_events_and_of_the_consumer_are_the_wall_time():
    began = time.perf_counter()
    consumer_s = 0.0
    events = []
    for event in run_steps(FakeProgram(), start(), Count(delay_s=0.004), 0, 10):
        events.append(event)
        paused = time.perf_counter()
        time.sleep(0.002)
        consumer_s += time.perf_counter() - paused
    wall_s = time.perf_counter() - began
    accounted = consumer_s + sum(event.data_wait_s + event.step_s for event in events)
    assert all(event.data_wait_s >= 0.004 for event in events)
    assert accounted == pytest.approx(wall_s, rel=0.1)
    assert accounted <= wall_s


@pytest.mark.usefixtures("float64")
def test_the_loop_is_the_plain_sequence_of_steps_bit_for_bit():
    program = tiny.program()

    class Batches:
        def batch(self, step: int) -> dict:
            return tiny.language_batch(step)

    expected, losses = tiny.state_of(program), []
    for step in range(4):
        expected, metrics = program.train_step(expected, tiny.language_batch(step))
        losses.append(float(metrics["loss"]))
    events = []
    for event in run_steps(program, tiny.state_of(program), Batches(), 0, 4, holds=lambda step: step == 2):
        events.append(event)
        if event.step == 4:
            assert trees.compare(expected, event.state) == []
    assert [event.metrics["loss"] for event in events] == losses
    assert isinstance(events[0].metrics["loss"], float)
    assert isinstance(events[0].metrics["num_tokens"], int)
    assert program.train_step.num_lowered == 1
