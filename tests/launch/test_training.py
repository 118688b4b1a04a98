"""Two real processes train the tiny experiment: they equal one process, stop together, survive a kill, and refuse.

One run directory is used by all tests of the first part, in their order: started and stopped by a signal, resumed and
killed, resumed to its end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.checkpoint.store import CheckpointStore
from jaxml.devices.spec import MeshSpec
from jaxml.launch.local import free_port
from jaxml.observe.metrics_log import read_metrics
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.preparing import prepare_data
from jaxml.recipes.train import TrainOptions, train
from tests.chaos.kills import COMMAND, logged_steps
from tests.tiny import tiny_experiment

ROOT = Path(__file__).resolve().parents[2]
LAST_STEP = 12
FILE = """
import dataclasses, os
from pathlib import Path
from tests.launch.test_training import experiment
def config():
    return experiment(Path({directory!r}))
"""
LAUNCH = ["launch", "local", "--processes", "2", "--devices", "2", "--"]


def experiment(directory: Path) -> Experiment:
    """12 steps over a mesh whose parameters lie in both processes, saved every 3 steps, evaluated every 6."""
    tiny = tiny_experiment(directory)
    return dataclasses.replace(
        tiny,
        mesh=MeshSpec(data=1, fsdp=4),
        train=dataclasses.replace(tiny.train, steps=LAST_STEP, batch_size=8, eval_every=6),
        checkpoint=CheckpointSpec(every=3, keep_last=2),
    )


@dataclass
class Launched:
    """A launcher that runs; `log` has what it and its processes say on stderr."""

    process: subprocess.Popen[str]
    log: Path

    def numbers(self) -> list[int]:
        """The process numbers of the processes that it started, in their order."""
        listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
        return sorted(pid for pid, parent in pairs if parent == self.process.pid)

    def when(self, is_time: Callable[[], bool], limit_s: float = 120) -> None:
        deadline = time.monotonic() + limit_s
        while not is_time():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.005)

    def end(self) -> tuple[int, dict[str, Any]]:
        out, _ = self.process.communicate(timeout=120)
        return self.process.returncode, json.loads(out.splitlines()[-1])


def launch(arguments: list[str], log: Path, **environment: str) -> Launched:
    cache = {"PYTHONPATH": str(ROOT), "JAXML_CACHE": str(ROOT / ".cache" / "launch")}
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments, "--json"],
            stdout=subprocess.PIPE,
            stderr=stream,
            env={**os.environ, **cache, **environment},
            text=True,
        )
    return Launched(process, log)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("several")
    (directory / "experiment.py").write_text(FILE.format(directory=str(directory)))
    return directory


def checkpoints(run_dir: Path) -> list[int]:
    with CheckpointStore(run_dir / "checkpoints") as store:
        return store.steps()


def test_a_signal_to_one_process_stops_all_at_the_same_step_after_saving(place: Path) -> None:
    run_dir = place / "run"
    launched = launch([*LAUNCH, "train", str(place / "experiment.py"), "--run-dir", str(run_dir)], place / "log1")
    launched.when(lambda: logged_steps(run_dir) >= 2)
    os.kill(launched.numbers()[1], signal.SIGTERM)
    code, result = launched.end()
    assert (code, result["status"]) == (75, "interrupted"), launched.log.read_text()
    assert 2 <= result["step"] < LAST_STEP
    assert checkpoints(run_dir)[-1] == result["step"] == logged_steps(run_dir)
    told = launched.log.read_text()
    assert "[1] jaxml: SIGTERM" in told and "[0] jaxml: SIGTERM" not in told
    assert re.search(r"^\[0\].*4 x cpu \(cpu\) in 2 processes", told, re.MULTILINE)
    assert not re.search(r"^\[1\] +experiment:", told, re.MULTILINE)  # one process tells the run


def test_a_process_killed_in_the_middle_ends_the_other_within_15_s_by_name(place: Path) -> None:
    run_dir = place / "run"
    launched = launch([*LAUNCH, "resume", str(run_dir)], place / "log2")
    before = checkpoints(run_dir)[-1]
    launched.when(lambda: logged_steps(run_dir) >= before + 2)
    killed, others = launched.numbers()[1], launched.numbers()[:1]
    os.kill(killed, signal.SIGKILL)
    begun = time.monotonic()
    code, result = launched.end()
    assert time.monotonic() - begun < 15
    assert code == 1 and result["error"] == "RunError"
    (fault,) = result["faults"]
    assert fault["failed"] == f"process 1 of 2 (pid {killed})"
    assert fault["got"] == "signal 9 (SIGKILL)"
    assert not any(Path(f"/proc/{pid}").exists() for pid in others)


def test_the_resumed_run_goes_on_to_the_losses_of_one_process(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = place / "run"
    code, result = launch([*LAUNCH, "resume", str(run_dir)], place / "log3").end()
    assert (code, result["status"], result["step"]) == (0, "finished", LAST_STEP), (place / "log3").read_text()
    with (place / "quiet").open("w") as stream:
        alone = train(experiment(place), place / "alone", TrainOptions(stream=stream))
    several, one = (read_metrics(directory / "metrics.jsonl") for directory in (run_dir, place / "alone"))
    assert [record["step"] for record in several] == list(range(1, LAST_STEP + 1))
    for name in ("loss", "grad_norm", "eval_loss"):
        pairs = [(record[name], other[name]) for record, other in zip(several, one, strict=True) if name in other]
        assert [left for left, _ in pairs] == pytest.approx([right for _, right in pairs], rel=1e-6), name
    assert [record["num_tokens"] for record in several] == [record["num_tokens"] for record in one]
    assert result["eval_num_tokens"] == alone.metrics["eval_num_tokens"]
    record = json.loads((run_dir / "run.json").read_text())
    assert (record["status"], len(record["lineage"])) == ("finished", 3)


def test_a_process_with_another_experiment_is_refused_by_name_in_all(place: Path) -> None:
    file = place / "other.py"
    file.write_text(
        (place / "experiment.py").read_text()
        + """
same = config
def config():
    e = same()
    rate = 1e-3 * (1 + int(os.environ["JAXML_PROCESS_ID"]))
    return dataclasses.replace(e, optimizer=dataclasses.replace(e.optimizer, learning_rate=rate))
"""
    )
    launched = launch([*LAUNCH, "train", str(file), "--run-dir", str(place / "refused")], place / "log4")
    code, result = launched.end()
    assert (code, result["error"]) == (2, "ConfigError"), launched.log.read_text()
    fault = result["faults"][-1]
    assert fault["failed"] == "optimizer.learning_rate of process 1 of 2"
    assert (fault["expected"], fault["got"]) == ("0.001, as in process 0", "0.002")
    told = launched.log.read_text()
    assert all(f"[{index}] jaxml: optimizer.learning_rate of process 1 of 2" in told for index in (0, 1))
    assert not (place / "refused" / "run.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["joined", "data is open", "compiled"])
def test_a_signal_before_the_first_step_ends_all_alike(place: Path, tmp_path: Path, moment: str) -> None:
    run_dir = tmp_path / "run"
    launched = launch([*LAUNCH, "train", str(place / "experiment.py"), "--run-dir", str(run_dir)], tmp_path / "log")
    launched.when(
        {
            "joined": lambda: (run_dir / "lock").exists(),
            "data is open": lambda: (run_dir / "run.json").exists(),
            "compiled": lambda: "experiment:" in launched.log.read_text(),
        }[moment]
    )
    os.kill(launched.numbers()[1], signal.SIGINT)
    code, result = launched.end()
    assert (code, result["status"]) == (75, "interrupted"), launched.log.read_text()
    assert result["step"] == (max(checkpoints(run_dir)) if result["step"] else 0)
    assert json.loads((run_dir / "run.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
def test_a_step_that_is_not_finite_stops_all_and_is_kept_once(place: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ["train", str(place / "experiment.py"), "--run-dir", str(run_dir), "--optimizer.learning-rate", "1e30"]
    code, result = launch([*LAUNCH, *arguments], tmp_path / "log").end()
    assert (code, result["error"]) == (1, "NonFiniteError"), (tmp_path / "log").read_text()
    assert result["faults"][-1]["failed"] == "training step 2"
    (event,) = json.loads((run_dir / "faults" / "events.json").read_text())
    assert len(event["documents"]) >= 8  # of the whole batch, not of one process's rows


@pytest.mark.slow
def test_an_error_of_one_process_alone_ends_the_other_and_is_named(place: Path, tmp_path: Path) -> None:
    """Process 1 finds another prepared directory, whose data is damaged."""
    prepare_data(experiment(place))
    damaged = tmp_path / "damaged"
    shutil.copytree(place / "prepared", damaged)
    shard = max((file for file in damaged.iterdir() if file.is_file()), key=lambda file: file.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-8])
    file = tmp_path / "one.py"
    file.write_text(
        (place / "experiment.py").read_text()
        + f"""
same = config
def config():
    e = same()
    is_second = os.environ["JAXML_PROCESS_ID"] == "1"
    return dataclasses.replace(e, data=dataclasses.replace(e.data, prepared={str(damaged)!r})) if is_second else e
"""
    )
    begun = time.monotonic()
    code, result = launch([*LAUNCH, "train", str(file), "--run-dir", str(tmp_path / "run")], tmp_path / "log").end()
    assert (code, result["error"]) == (1, "DataError"), (tmp_path / "log").read_text()
    assert result["faults"][0]["failed"].startswith("process 1 of 2")
    assert time.monotonic() - begun < 60
    assert "process 0 ends because process 1 failed" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_processes_that_a_scheduler_started_find_each_other(place: Path, tmp_path: Path) -> None:
    """Two processes with the environment of a Slurm step on this machine, without the launcher."""
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    port, run_dir = {"JAX_COORDINATOR_PORT": str(free_port())}, str(tmp_path / "run")
    arguments = ["train", str(place / "experiment.py"), "--run-dir", run_dir, "--distributed", "--join-timeout", "60"]
    few = ["--mesh.fsdp", "2", "--train.steps", "2"]
    started = [
        launch(
            [*arguments, *few],
            tmp_path / f"log{index}",
            **slurm, **port, SLURM_PROCID=str(index), SLURM_LOCALID=str(index),
        )
        for index in (0, 1)
    ]  # fmt: skip
    for index, launched in enumerate(started):
        code, result = launched.end()
        assert (code, result["status"], result["step"]) == (0, "finished", 2), launched.log.read_text()
        assert ("2 x cpu (cpu) in 2 processes" in launched.log.read_text()) == (index == 0)
