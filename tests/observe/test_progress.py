"""What the display says, on a terminal and in a log."""

from __future__ import annotations

import io
import itertools

import pytest

from jaxml.observe.progress import Pace, Progress, duration, short

METRICS = {"loss": 2.30119, "num_tokens": 1000, "step_s": 0.49, "data_wait_s": 0.01}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(stream, steps, step_s=0.5, total=100, first_step=0):
    clock = itertools.count()
    with Progress(total, first_step, stream, now=lambda: next(clock) * step_s) as progress:
        for step in steps:
            progress.write(step, METRICS)
    return stream.getvalue()


def test_a_line_says_step_loss_throughput_data_wait_and_time_left():
    assert run(io.StringIO(), [1]) == "step 1  loss 2.3012  2k tokens/s  data wait 2.0%  0:50 left\n"


def test_a_log_gets_a_line_every_five_seconds_and_the_last_step():
    lines = run(io.StringIO(), range(1, 26), total=25).splitlines()
    assert [line.split()[1] for line in lines] == ["1", "11", "21", "25"]
    assert lines[-1].endswith("0:00 left")


def test_a_resumed_run_counts_its_own_pace():
    assert "step 91 " in (text := run(io.StringIO(), [91], first_step=90))
    assert "0:04 left" in text  # 9 steps of 0.5 s


def test_time_left_follows_the_wall_and_so_includes_pauses():
    pace = Pace(total_steps=10, first_step=0, now=0.0)
    pace.observe(1, METRICS, now=0.5)
    pace.observe(2, METRICS, now=4.0)  # an evaluation lay between
    assert pace.left_s(2) == pytest.approx(8 * 2.0)


def test_rates_start_again_after_a_rewind():
    pace = Pace(total_steps=10, first_step=0, now=0.0)
    pace.observe(5, METRICS, now=5.0)
    pace.observe(3, METRICS, now=6.0)
    assert pace.left_s(3) is None
    pace.observe(4, METRICS, now=8.0)
    assert pace.left_s(4) == pytest.approx(6 * 2.0)


@pytest.mark.parametrize("metrics", [{}, {"loss": None}, {"loss": float("nan")}, {"loss": 1.0, "step_s": 0.0}])
def test_metrics_that_are_missing_or_not_finite_are_shown_as_such(metrics):
    stream = io.StringIO()
    with Progress(10, stream=stream) as progress:
        progress.write(1, metrics)
    assert stream.getvalue().startswith("step 1  loss ")


def test_a_terminal_gets_a_bar_with_the_same_words_and_the_notes_above_it():
    stream = Terminal()
    with Progress(100, stream=stream) as progress:
        progress.note("eval [b]loss[/b] 1.9")
        progress.write(100, METRICS)
    text = stream.getvalue()
    assert "step 100/100" in text
    assert "loss 2.3012  2k tokens/s" in text
    assert "eval [b]loss[/b] 1.9" in text  # never read as markup


def test_the_bar_leaves_stdout_alone(capsys):
    with Progress(10, stream=Terminal()) as progress:
        print('{"step": 10}')
        progress.write(10, METRICS)
    assert capsys.readouterr().out == '{"step": 10}\n'


def test_stderr_is_the_default(capsys):
    with Progress(10) as progress:
        progress.note("seeking to step 1,000,000")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "seeking to step 1,000,000\n")


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999.4, "999"), (999.6, "1k"), (31234, "31.2k"), (2.5e6, "2.5M")]
)
def test_short_numbers(number, text):
    assert short(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599.7, "1:00:00"), (90061, "25:01:01")])
def test_durations(seconds, text):
    assert duration(seconds) == text
