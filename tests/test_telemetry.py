"""The account sums to the wall time whatever is opened, added or marked; nested spans never count a second twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.telemetry import KINDS, WallClock, process_age_s


class FakeTime:
    """A clock that moves only when told to."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def account(age_s: float = 0.0) -> tuple[WallClock, FakeTime]:
    fake = FakeTime()
    return WallClock(now=fake, age_s=age_s), fake


def spent(clock: WallClock) -> dict[str, float]:
    return {kind: seconds for kind, seconds in clock.summary().items() if seconds}


kinds = st.sampled_from(KINDS)
seconds = st.floats(0.0, 1e4)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("sleep"), seconds),
        st.tuples(st.just("enter"), kinds),
        st.tuples(st.just("exit"), st.none()),
        st.tuples(st.just("add"), st.tuples(kinds, seconds)),
        st.tuples(st.just("imported"), st.none()),
        st.tuples(st.just("restarted"), st.none()),
    ),
    max_size=30,
)


@given(actions, seconds)
def test_the_account_sums_to_the_wall_time_after_any_sequence_of_actions(sequence, age_s):
    clock, fake = account(age_s)
    opened, slept = [], age_s
    for name, value in sequence:
        if name == "sleep":
            fake.sleep(value)
            slept += value
        elif name == "enter":
            opened.append(clock.span(value))
            opened[-1].__enter__()
        elif name == "exit" and opened:
            opened.pop().__exit__(None, None, None)
        elif name == "add":
            clock.add(*value)
        elif name == "imported":
            clock.mark_imported()
        elif name == "restarted":
            clock.mark_restarted()
    summary = clock.summary()
    assert tuple(summary) == KINDS
    assert all(value >= 0 for value in summary.values())
    assert sum(summary.values()) == pytest.approx(slept, abs=1e-6)
    assert sum(clock.shares().values()) == pytest.approx(1.0, abs=1e-9)


def test_nested_spans_are_exclusive():
    clock, fake = account()
    clock.mark_imported()
    with clock.span("step"):
        fake.sleep(3)
        with clock.span("data_wait"):
            fake.sleep(2)
        fake.sleep(1)
    assert spent(clock) == {"step": 4, "data_wait": 2}


def test_a_span_that_raises_is_charged_and_closed():
    clock, fake = account()
    clock.mark_imported()
    with suppress(KeyboardInterrupt), clock.span("eval"):
        fake.sleep(5)
        raise KeyboardInterrupt
    fake.sleep(1)
    assert spent(clock) == {"eval": 5, "other": 1}


def test_everything_before_mark_imported_is_import_and_later_other():
    clock, fake = account(age_s=2.0)
    fake.sleep(3)
    clock.mark_imported()
    fake.sleep(4)
    assert spent(clock) == {"import": 5, "other": 4}


def test_add_moves_seconds_out_of_the_open_span_and_never_more_than_it_holds():
    clock, fake = account()
    clock.mark_imported()
    fake.sleep(4)
    clock.add("data_wait", 1.5)
    with clock.span("step"):
        fake.sleep(2)
        clock.add("compile", 50.0)
    assert spent(clock) == {"other": 2.5, "data_wait": 1.5, "compile": 2}


def test_mark_restarted_keeps_import_and_compile_and_takes_the_rest():
    clock, fake = account(age_s=1.0)
    clock.mark_imported()
    for kind, seconds in (("checkpoint", 2), ("compile", 3), ("data_wait", 4)):
        with clock.span(kind):
            fake.sleep(seconds)
    fake.sleep(5)
    clock.mark_restarted()
    with clock.span("step"):
        fake.sleep(6)
    assert spent(clock) == {"import": 1, "compile": 3, "restart": 11, "step": 6}


def test_seconds_of_previous_processes_are_added_and_are_no_part_of_the_restart():
    first, fake = account(age_s=1.0)
    first.mark_imported()
    with first.span("step"):
        fake.sleep(9)
    second, _ = account(age_s=2.0)
    second.mark_imported()
    second.add_previous(first.summary())
    second.mark_restarted()
    assert spent(second) == {"import": 3, "step": 9}
    with pytest.raises(KeyError, match="lunch"):
        second.add_previous({"lunch": 1.0})


def test_shares_of_an_empty_account_still_sum_to_one():
    assert account()[0].shares()["other"] == 1.0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the start of a process is read from Linux's /proc")
def test_the_start_of_the_interpreter_counts():
    """0.3 s pass before jaxml is imported, in a process whose name has spaces and brackets in it."""
    script = (
        "import time; time.sleep(0.3); from pathlib import Path\n"
        "Path('/proc/self/comm').write_text('a) b (c')\n"
        "from jaxml.telemetry import WallClock; print(WallClock().summary()['import'])"
    )
    before = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert 0.3 <= float(answer.stdout) <= time.perf_counter() - before + 0.02  # the start is in ticks of 10 ms


@pytest.mark.parametrize("content", [None, "", "1 (python) R 0", "1 (python) R" + " 0" * 40])
def test_a_system_that_does_not_say_when_the_process_started_counts_from_construction(tmp_path, content):
    stat = tmp_path / "stat"
    if content is not None:
        stat.write_text(content)
    assert process_age_s(stat) == 0.0


def test_telemetry_imports_no_jax():
    script = "import sys, jaxml.telemetry; assert not {'jax', 'numpy'} & set(sys.modules), 'jax or numpy imported'"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
