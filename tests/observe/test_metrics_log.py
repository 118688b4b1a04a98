"""metrics.jsonl: what is written is read; any tear at the end is dropped; resuming never forks or repeats a curve."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxml.errors import RunError
from jaxml.observe.metrics_log import MetricsLog, encode, read_metrics

numbers = st.one_of(st.integers(-(2**53), 2**53), st.floats(), st.booleans(), st.none(), st.text())
values = st.recursive(numbers, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6)
names = st.text().filter(lambda name: name not in ("step", "nonfinite"))
metrics = st.dictionaries(names, values, max_size=5)


def finite(value):
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def reject_constant(name):
    raise AssertionError(f"{name} is not JSON")


def written(path, last_step):
    with MetricsLog(path) as log:
        for step in range(1, last_step + 1):
            log.write(step, {"loss": step / 3})
    return path


@settings(max_examples=40)
@given(st.lists(metrics, max_size=3))
def test_reading_is_the_inverse_of_writing_except_that_nonfinite_numbers_are_null(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step, record in enumerate(records):
            log.write(step, record)
            assert read_metrics(path)[-1]["step"] == step  # on disk before the next step
    read = [{k: v for k, v in record.items() if k != "nonfinite"} for record in read_metrics(path)]
    assert read == [{"step": step, **finite(record)} for step, record in enumerate(records)]


@settings(max_examples=50)
@given(metrics)
def test_every_line_is_strict_json_with_the_step_first(record):
    line = encode(3, record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert next(iter(json.loads(line, parse_constant=reject_constant))) == "step"


def test_nonfinite_numbers_are_named_by_their_dotted_path():
    line = encode(
        1, {"loss": math.inf, "terms": {"z": [0.5, -math.inf]}, "grad_norm": np.float32("nan"), "n": np.int32(4)}
    )
    assert json.loads(line) == {
        "step": 1,
        "loss": None,
        "terms": {"z": [0.5, None]},
        "grad_norm": None,
        "n": 4,
        "nonfinite": ["loss", "terms.z.1", "grad_norm"],
    }


def test_a_float32_scalar_keeps_its_exact_value(tmp_path):
    value = np.float32(0.1)
    assert np.float32(json.loads(encode(1, {"loss": value}))["loss"]) == value


@pytest.mark.parametrize("cut", range(1, len(encode(3, {"loss": 1.0}))))
def test_a_torn_last_line_is_dropped_by_the_reader_and_cut_off_before_the_next_write(tmp_path, cut):
    path = written(tmp_path / "metrics.jsonl", 3)
    content = path.read_bytes()
    last = content.rstrip(b"\n").rindex(b"\n") + 1
    path.write_bytes(content[: last + cut])
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    with MetricsLog(path) as log:
        log.write(3, {"loss": 1.0})
    assert path.read_bytes() == content  # 3 / 3 == 1.0


@settings(max_examples=30)
@given(st.integers(0, 6), st.integers(0, 8))
def test_a_resumed_curve_equals_the_straight_one(tmp_path_factory, killed_after, resumed_after):
    """Killed after some step, resumed after the checkpoint of an earlier one: the file is that of the straight run."""
    directory = tmp_path_factory.mktemp("log")
    straight = written(directory / "straight.jsonl", 8)
    path = written(directory / "metrics.jsonl", killed_after)
    first = min(resumed_after, killed_after)
    with MetricsLog(path) as log:
        log.truncate(first)
        assert [record["step"] for record in read_metrics(path)] == list(range(1, first + 1))
        for step in range(first + 1, 9):
            log.write(step, {"loss": step / 3})
    assert path.read_bytes() == straight.read_bytes()


def test_a_step_cannot_be_written_twice(tmp_path):
    path = written(tmp_path / "metrics.jsonl", 3)
    with MetricsLog(path) as log, pytest.raises(RunError, match="expected: a step after 3"):
        log.write(3, {"loss": 1.0})
    assert len(read_metrics(path)) == 3


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_truncate_leaves_the_old_file_when_it_is_interrupted(tmp_path, monkeypatch, failing):
    path = written(tmp_path / "metrics.jsonl", 5)
    before = path.read_bytes()

    def die(*_):
        raise KeyboardInterrupt

    with MetricsLog(path) as log, monkeypatch.context() as patch:
        patch.setattr(os, failing, die)
        with pytest.raises(KeyboardInterrupt):
            log.truncate(2)
    assert path.read_bytes() == before
    with MetricsLog(path) as log:  # a left-over temporary file does no harm
        log.truncate(2)
    assert len(read_metrics(path)) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_is_a_run_error_and_the_reader_drops_the_part_that_was_written(tmp_path):
    path = written(tmp_path / "metrics.jsonl", 2)

    class FullDisk:
        """Takes the first 7 bytes of a line, then has no space."""

        def __init__(self, file):
            self.file, self.space = file, 7

        def write(self, line):
            if not self.space:
                raise OSError(28, "No space left on device")
            taken, self.space = self.space, 0
            return self.file.write(line[:taken])

        def close(self):
            self.file.close()

    with MetricsLog(path) as log:
        log._file = FullDisk(log._file)
        with pytest.raises(RunError, match="No space left on device"):
            log.write(3, {"loss": 1.0})
    assert path.read_bytes().endswith(b'{"step"')
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("line", [b"not json", b"[1]", b'{"loss":1.0}', b'{"step":"1"}', b"\x00\xff"])
def test_a_damaged_line_is_named_by_its_number(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n' + line + b'\n{"step":3}\n')
    for open_it in (read_metrics, MetricsLog):
        with pytest.raises(RunError, match=r"metrics\.jsonl, line 2"):
            open_it(path)


def test_a_missing_or_unwritable_file_says_what_to_do(tmp_path):
    with pytest.raises(RunError, match="name the run directory"):
        read_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(RunError, match="a file that can be written"):
        MetricsLog(tmp_path / "absent" / "metrics.jsonl")
