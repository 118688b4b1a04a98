"""The launcher, with processes that compute nothing: what it passes on, whom it names, and that nobody is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxml.cli.launch import main
from jaxml.errors import ConfigError, DataError, RunError
from jaxml.launch import local
from jaxml.launch.local import run

ROOT = Path(__file__).resolve().parents[2]
# What each started process does first: it knows its number, and ends with its launcher.
BEGIN = """
import os, signal, sys, time
from jaxml.launch.local import end_with_launcher
end_with_launcher(os.environ)
index = int(os.environ["JAXML_PROCESS_ID"])
"""


@pytest.fixture
def does(monkeypatch: pytest.MonkeyPatch):
    """does(code): what the started processes run instead of the `jaxml` command."""

    def set_to(code: str) -> dict[str, str]:
        monkeypatch.setattr(local, "COMMAND", BEGIN + code)
        return {**os.environ, "PYTHONPATH": str(ROOT)}

    return set_to


def test_the_result_is_that_of_process_0_and_lines_have_their_number(does, capfd: pytest.CaptureFixture[str]) -> None:
    environment = does("print('a line', file=sys.stderr); print('words'); print('{\"index\": %d}' % index)")
    assert run(["train"], 3, 2, environment) == ({"index": 0}, 0)
    shown = capfd.readouterr()
    assert sorted(shown.err.splitlines()) == ["[0] a line", "[1] a line", "[2] a line"]
    assert shown.out == ""


def test_each_process_is_told_who_it_is(does) -> None:
    names = ["JAXML_COORDINATOR", "JAXML_NUM_PROCESSES", "JAXML_PROCESS_ID", "JAXML_CPU_DEVICES"]
    environment = does(
        f"import json; print(json.dumps({{n: os.environ[n] for n in {names}}} | {{'argv': sys.argv[1:]}}))"
    )
    told, code = run(["train", "FILE"], 2, 4, environment)
    host, _, port = told.pop("JAXML_COORDINATOR").rpartition(":")
    assert (host, code) == ("127.0.0.1", 0) and int(port) > 0
    assert told == {
        "JAXML_NUM_PROCESSES": "2",
        "JAXML_PROCESS_ID": "0",
        "JAXML_CPU_DEVICES": "4",
        "argv": ["train", "FILE", "--json"],
    }


def test_interrupted_processes_give_the_code_that_asks_for_the_job_again(does) -> None:
    assert run(["train"], 2, 1, does("print('{}'); sys.exit(75)")) == ({}, 75)


@pytest.mark.parametrize(
    ("death", "named"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal 9 (SIGKILL)"),
        ("os.abort()", "signal 6 (SIGABRT)"),
        ("sys.exit(3)", "exit code 3"),
    ],
)
def test_a_process_that_dies_ends_the_others_and_is_named(does, monkeypatch, death: str, named: str) -> None:
    monkeypatch.setattr(local, "LET_END_S", 0.2)
    environment = does(f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nif index == 1: {death}\ntime.sleep(60)")
    begun = time.monotonic()
    with pytest.raises(RunError, match="process 1 of 3") as caught:
        run(["train"], 3, 1, environment)
    assert named in str(caught.value)
    assert time.monotonic() - begun < 10


def test_one_that_does_not_hear_is_killed_in_time(does, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local.LET_END_S + local.TERMINATE_S < 10  # of the 15 s that are promised
    monkeypatch.setattr(local, "LET_END_S", 0.3)
    monkeypatch.setattr(local, "TERMINATE_S", 0.3)
    environment = does("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif index == 1: sys.exit(3)\ntime.sleep(60)")
    begun = time.monotonic()
    with pytest.raises(RunError, match="process 1 of 2"):
        run(["train"], 2, 1, environment)
    assert time.monotonic() - begun < 5


def test_the_cause_is_named_and_not_the_one_that_left_because_of_it(does) -> None:
    environment = does("if index == 0: sys.exit(76)\ntime.sleep(1); sys.exit(4)")
    with pytest.raises(RunError, match="process 1 of 2") as caught:
        run(["train"], 2, 1, environment)
    assert "exit code 4" in str(caught.value)


def test_an_error_that_a_process_told_is_raised_with_its_number(does, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LET_END_S", 0.2)
    fault = {"failed": "the data", "expected": "some", "got": "none", "todo": "bring some"}
    told = json.dumps({"error": "DataError", "faults": [fault]})
    environment = does(f"print({told!r}) if index == 1 else time.sleep(60)\nsys.exit(1)")
    with pytest.raises(DataError) as caught:
        run(["train"], 2, 1, environment)
    assert [fault.failed.partition(" (")[0] for fault in caught.value.faults] == ["process 1 of 2", "the data"]


LAUNCHER = """
import os
from jaxml.launch import local
local.COMMAND = {command!r}
print(local.run(["train"], 2, 1, os.environ))
"""


def launcher(code: str, tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A launcher in a process of its own, and the process numbers of what it started, which write them to files."""
    command = BEGIN + f"open({str(tmp_path)!r} + f'/{{index}}', 'w').write(str(os.getpid()))\n" + code
    started = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER.format(command=command)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not all(
        f.exists() and f.read_text() for f in (tmp_path / "0", tmp_path / "1")
    ):
        time.sleep(0.01)
    return started, [int((tmp_path / name).read_text()) for name in ("0", "1")]


def is_there(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_ctrl_c_which_goes_to_the_whole_group_reaches_every_process_once(tmp_path: Path) -> None:
    code = "heard = []\nsignal.signal(signal.SIGINT, lambda *_: heard.append(1))\n"
    code += f"open({str(tmp_path)!r} + f'/ready{{index}}', 'w')\n"
    code += "while not heard: time.sleep(0.01)\ntime.sleep(0.3); print('{\"heard\": %d}' % len(heard)); sys.exit(75)"
    started, pids = launcher(code, tmp_path)
    assert started.pid not in map(os.getpgid, pids)
    while not all((tmp_path / f"ready{index}").exists() for index in (0, 1)):
        time.sleep(0.01)
    os.killpg(started.pid, signal.SIGINT)
    out, _ = started.communicate(timeout=20)
    assert out.strip() == "({'heard': 1}, 75)"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nobody_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    started, pids = launcher("time.sleep(60)", tmp_path)
    assert all(map(is_there, pids))
    started.kill()
    started.communicate()
    deadline = time.monotonic() + 10
    while any(map(is_there, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_there, pids))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["local", "--processes", "0", "--", "train", "x"], ["--processes"]),
        (["local", "--devices", "-1", "--", "serve", "x"], ["--devices", "what to launch"]),
        (["local"], ["what to launch"]),
    ],
)
def test_what_cannot_be_launched_is_refused_by_name(arguments: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        main(arguments)
    assert [fault.failed for fault in caught.value.faults] == named
