"""Of processes that prepare one directory, one writes; the others wait, can be stopped, and find finished data."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxml.data import lock
from jaxml.data.layout import LOCK_FILE
from jaxml.data.lock import only_writer
from jaxml.data.prepare import prepare
from jaxml.data.spec import DataSpec, TextSource
from jaxml.data.tokenise import Progress
from jaxml.errors import DataError
from jaxml.inputs.spec import BpeTokenizerSpec
from tests.data.conftest import sentence


@pytest.fixture
def spec(write_lines: Callable[..., str], tmp_path: Path) -> DataSpec:
    path = write_lines("a.txt", [sentence(n) for n in range(300)])
    folder = str(tmp_path / "prepared")
    return DataSpec((TextSource(path, "line"),), folder, 16, BpeTokenizerSpec(270), held_out=0.2, shard_tokens=1000)


class Left(Exception):
    """What a caller raises to stop waiting."""


def test_a_second_preparation_waits_then_finds_the_finished_data(
    spec: DataSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "POLL_S", 0.01)
    is_inside, go_on = threading.Event(), threading.Event()
    first: list[Progress] = []
    second: list[Progress] = []

    def slow(progress: Progress) -> None:
        first.append(progress)
        if progress.stage == "tokenise":
            is_inside.set()
            assert go_on.wait(20)

    def waiting(progress: Progress) -> None:
        second.append(progress)
        go_on.set()

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(prepare, spec, progress=slow)
        assert is_inside.wait(20)
        waited = prepare(spec, progress=waiting)
        assert waited.fingerprint == writer.result().fingerprint
    assert {progress.stage for progress in first} == {"hash", "tokenizer", "tokenise", "plan", "verify"}
    assert [progress.stage for progress in second if progress.stage != "wait"] == ["hash"]
    assert second[0] == Progress("wait", f"process {os.getpid()}")
    assert (waited.directory / LOCK_FILE).read_bytes() == b""


def test_who_waits_can_leave_and_the_writer_is_not_disturbed(spec: DataSpec, tmp_path: Path) -> None:
    def leave(progress: Progress) -> None:
        raise Left(progress.stage)

    with only_writer(tmp_path / "prepared", lambda _: None):
        (tmp_path / "prepared" / ".tokens-00000.bin.tmp").write_bytes(b"being written")
        for _ in range(2):
            with pytest.raises(Left, match="wait"):
                prepare(spec, progress=leave)
        assert (tmp_path / "prepared" / ".tokens-00000.bin.tmp").read_bytes() == b"being written"
    assert prepare(spec).num_rows("train")


def test_a_writer_that_is_killed_frees_the_lock(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from jaxml.data.lock import only_writer\n"
        "with only_writer(Path(sys.argv[1]), print):\n    print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    waits: list[str] = []

    def kill(name: str) -> None:
        if not waits:
            holder.send_signal(signal.SIGKILL)
            holder.wait(20)
        waits.append(name)

    with only_writer(tmp_path, kill):
        assert set(waits) == {f"process {holder.pid}"}
    holder.stdout.close()


def test_finished_data_that_cannot_be_written_is_opened_without_a_lock(
    spec: DataSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open
    prepared = prepare(spec)
    (prepared.directory / LOCK_FILE).unlink()

    def read_only(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(30, "Read-only file system", str(path))
        return open_file(path, flags, mode)

    monkeypatch.setattr(os, "open", read_only)
    assert prepare(spec).fingerprint == prepared.fingerprint
    assert not (prepared.directory / LOCK_FILE).exists()
    with pytest.raises(DataError, match=r"prepare\.lock(.|\n)*Read-only"):
        prepare(dataclasses.replace(spec, prepared=f"{spec.prepared}-elsewhere"))
