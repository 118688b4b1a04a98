"""The event files, read back as TensorBoard reads them."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest

from jaxml.errors import MissingExtraError
from jaxml.observe import tensorboard
from jaxml.observe.tensorboard import TensorBoardLog


def events(directory):
    """Every event of a log directory, files in the order of their names (TFRecord: length, crc, data, crc)."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def curve(directory, tag):
    """The points TensorBoard shows: a session start drops what has its step or a later one (its event accumulator)."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import SessionLog

    points = []
    for event in events(directory):
        if event.HasField("session_log") and event.session_log.status == SessionLog.START:
            points = [point for point in points if point[0] < event.step]
        for value in event.summary.value:
            if value.tag == tag:
                points.append((event.step, value.simple_value))
    return points


@pytest.fixture(autouse=True)
def _needs_tensorboardx(request):
    if "missing" not in request.node.name:
        pytest.importorskip("tensorboardX")


def test_every_finite_number_becomes_a_point(tmp_path):
    with TensorBoardLog(tmp_path) as log:
        log.write(1, {"loss": np.float32(2.5), "grad_norm": float("nan"), "note": "text", "nonfinite": ["grad_norm"]})
        log.write(2, {"loss": 2.0, "grad_norm": 1})
    assert curve(tmp_path, "loss") == [(1, 2.5), (2, 2.0)]
    assert curve(tmp_path, "grad_norm") == [(2, 1.0)]
    assert curve(tmp_path, "note") == []


def test_after_a_resume_in_a_new_process_the_curve_neither_forks_nor_repeats(tmp_path):
    with TensorBoardLog(tmp_path) as log:
        for step in range(1, 8):
            log.write(step, {"loss": step})
    with TensorBoardLog(tmp_path, last_step=4) as log:
        for step in range(5, 11):
            log.write(step, {"loss": -step})
    assert len(list(tmp_path.iterdir())) == 2
    assert [step for step, _ in curve(tmp_path, "loss")] == list(range(1, 11))
    assert [value for _, value in curve(tmp_path, "loss")] == [1, 2, 3, 4, -5, -6, -7, -8, -9, -10]


def test_a_rewind_in_the_same_process_drops_the_later_points(tmp_path):
    with TensorBoardLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(step, {"loss": step})
        log.truncate(1)
        log.write(2, {"loss": 20})
    assert curve(tmp_path, "loss") == [(1, 1), (2, 20)]


def test_flush_puts_everything_on_disk(tmp_path):
    log = TensorBoardLog(tmp_path)
    log.write(1, {"loss": 1.0})
    log.flush()
    assert curve(tmp_path, "loss") == [(1, 1.0)]
    log.close()


def test_writing_flushes_by_itself_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "FLUSH_EVERY_S", 0.0)
    log = TensorBoardLog(tmp_path)
    log.write(1, {"loss": 1.0})
    assert curve(tmp_path, "loss") == [(1, 1.0)]
    log.close()


def test_a_missing_tensorboardx_names_the_extra(tmp_path, monkeypatch):
    for name in [*(n for n in sys.modules if n.startswith("tensorboardX")), "tensorboardX.event_file_writer"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"jaxml\[track\]"):
        TensorBoardLog(tmp_path)
