"""Laws of what is measured from outside: the clock stops at the awaited line, and a failure says what happened."""

from __future__ import annotations

import sys
import time

import pytest

from benchmarks.processes import MeasurementError, environment, last_line, run_json, time_until
from benchmarks.run import command_of, cpu_model, parse, python_with
from benchmarks.train_rows import stall_rows

WRITE = "import sys, time; f = open(sys.argv[1], 'w'); time.sleep(0.2); print('{\"step\":1}', file=f, flush=True); "


def test_only_finished_lines_count(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert last_line(metrics) == {}
    metrics.write_text('{"step":1')
    assert last_line(metrics) == {}
    metrics.write_text('{"step":1}\n{"st')
    assert last_line(metrics) == {"step": 1}
    metrics.write_text("".join(f'{{"step":{step}}}\n' for step in range(5000)))
    assert last_line(metrics) == {"step": 4999}


def test_json_is_read_from_the_last_line_and_failures_show_stderr():
    assert run_json([sys.executable, "-c", "print('log'); print('{\"a\": 1.5}')"], environment()) == {"a": 1.5}
    with pytest.raises(MeasurementError, match=r"expected: exit code 0(.|\n)*got: 1(.|\n)*ZeroDivisionError"):
        run_json([sys.executable, "-c", "1 / 0"], environment())
    with pytest.raises(MeasurementError, match="JSON on the last line"):
        run_json([sys.executable, "-c", "pass"], environment())


def test_the_clock_stops_at_the_line_and_the_process_is_killed(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    command = [sys.executable, "-c", WRITE + "time.sleep(20)", str(metrics)]
    begun = time.perf_counter()
    reached_s, _ = time_until(command, lambda: bool(last_line(metrics)), environment(), tmp_path / "log", stop=True)
    assert reached_s >= 0.2
    assert time.perf_counter() - begun < 15


def test_a_process_left_to_end_is_timed_twice(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    command = [sys.executable, "-c", WRITE + "time.sleep(0.3)", str(metrics)]
    reached_s, ended_s = time_until(
        command, lambda: bool(last_line(metrics)), environment(), tmp_path / "log", stop=False
    )
    assert ended_s - reached_s >= 0.2


def test_a_process_that_ends_too_soon_is_reported_with_its_log(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no data')"]
    with pytest.raises(MeasurementError, match=r"got: exit code 1\n(.|\n)*no data"):
        time_until(command, lambda: False, environment(), tmp_path / "log", stop=True)


def test_the_stall_is_taken_from_the_step_after_each_save():
    lines = [{"step_s": 0.09, "data_wait_s": 0.01, "checkpoint_s": 0.5 * (step in (3, 6))} for step in range(10)]
    a_save, share = stall_rows(lines)
    assert a_save.values == (0.5, 0.5)
    assert share.values == (pytest.approx(1.0 / 2.0),)


def test_flags_choose_sections_in_their_own_order_and_the_command_names_no_path():
    args = parse(["train", "--quick", "--only", "seek,steps", "--torch-python", "somewhere/python"])
    assert args.only == ["steps", "seek"]
    assert command_of(args) == "nox -s bench -- train --quick --only steps,seek"
    with pytest.raises(SystemExit):
        parse(["train", "--only", "speed"])
    with pytest.raises(SystemExit):
        parse(["decode", "--only", "steps"])


def test_a_python_that_was_named_must_have_the_modules_and_the_own_one_is_taken_if_it_has():
    assert python_with(("json",), None, "--torch-python") == sys.executable
    assert python_with(("no_such_module",), None, "--torch-python") is None
    assert python_with((), "somewhere/python", "--torch-python") is None
    with pytest.raises(SystemExit):
        python_with(("json",), "somewhere/python", "--torch-python")


def test_the_processor_is_named_as_the_kernel_does(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A Processor @ 2 GHz\nmodel name\t: B\n")
    assert cpu_model(cpuinfo) == "A Processor @ 2 GHz"
    assert cpu_model(tmp_path / "none")
